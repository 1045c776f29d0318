// Answers queries as the site's search field does: node search.js SITE < QUERIES, both lists in JSON. It runs the site's own worker.
const fs = require("fs"), path = require("path");
const site = process.argv[2], queries = JSON.parse(fs.readFileSync(0, "utf8"));
const folder = path.join(site, "assets/javascripts/workers");
const worker = fs.readdirSync(folder).find(name => /^search\..*\.js$/.test(name));
const SETUP = 0, QUERY = 2;

let hear, answer;
Object.assign(globalThis, {
  self: globalThis,
  addEventListener: (kind, handler) => { hear = handler; },
  postMessage: message => { answer = message; },
});
(0, eval)(fs.readFileSync(path.join(folder, worker), "utf8"));

async function ask(type, data) {
  await hear({ data: { type, data } });
  return answer.data;
}

async function main() {
  const index = JSON.parse(fs.readFileSync(path.join(site, "search/search_index.json"), "utf8"));
  await ask(SETUP, { ...index, options: { suggest: false } });
  const found = [];
  for (const query of queries) found.push((await ask(QUERY, query)).items.map(([best]) => best.location.split("#")[0]));
  console.log(JSON.stringify(found));
}

main();
