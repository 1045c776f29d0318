import com.sun.net.httpserver.HttpExchange;
import com.sun.net.httpserver.HttpServer;
import java.io.FileWriter;
import java.io.IOException;
import java.net.InetSocketAddress;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.StandardCopyOption;
import java.util.Arrays;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.stream.Collectors;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.yarn.api.records.*;
import org.apache.hadoop.yarn.conf.YarnConfiguration;

/**
 * A stand-in of a YARN cluster in one process: {@code java StandIn FOLDER NODES MEMORY_MB CORES INHERITED_VARIABLE…}.
 *
 * <p>It writes FOLDER/conf, the configuration for clients, then FOLDER/control, the address at which a test tells it what is to
 * happen. It ends, and with it all containers, when its standard input does: also where the test has been killed.
 */
final class StandIn {
  private static final long STARTED = System.currentTimeMillis();

  private final ResourceManager manager;

  private StandIn(ResourceManager manager) {
    this.manager = manager;
  }

  public static void main(String[] arguments) throws Exception {
    Path folder = Path.of(arguments[0]).toAbsolutePath();
    Path conf = Files.createDirectories(folder.resolve("conf"));
    ResourceManager manager = new ResourceManager(new YarnConfiguration());
    Resource capacity = Resource.newInstance(Integer.parseInt(arguments[2]), Integer.parseInt(arguments[3]));
    Set<String> inherited = Set.of(Arrays.copyOfRange(arguments, 4, arguments.length));
    for (int number = 1; number <= Integer.parseInt(arguments[1]); number++) {
      String host = "127.0.0." + (number + 1);
      manager.nodes.put(host, new Node(manager, host, capacity, folder.resolve("nodes"), conf, inherited));
    }
    write(conf.resolve("core-site.xml"), Map.of("fs.defaultFS", "file:///", "hadoop.tmp.dir", folder.resolve("tmp").toString()));
    write(conf.resolve("yarn-site.xml"), Map.of(
        YarnConfiguration.RM_ADDRESS, address(manager.clientAddress),
        YarnConfiguration.RM_SCHEDULER_ADDRESS, address(manager.masterAddress),
        YarnConfiguration.TIMELINE_SERVICE_ENABLED, "false"));
    HttpServer control = HttpServer.create(new InetSocketAddress("127.0.0.1", 0), 0);
    control.createContext("/", new StandIn(manager)::answer);
    control.start();
    Path made = Files.writeString(folder.resolve("control.new"), address(control.getAddress()));
    Files.move(made, folder.resolve("control"), StandardCopyOption.ATOMIC_MOVE);
    while (System.in.read() >= 0) continue;
    synchronized (manager) {
      for (Allocation container : manager.containers.values()) if (container.process != null) Node.signal("KILL", container.pid());
      Runtime.getRuntime().halt(0);
    }
  }

  private static void write(Path file, Map<String, String> settings) throws IOException {
    Configuration written = new Configuration(false);
    settings.forEach(written::set);
    try (FileWriter writer = new FileWriter(file.toFile())) {
      written.writeXml(writer);
    }
  }

  private static String address(InetSocketAddress address) {
    return address.getAddress().getHostAddress() + ":" + address.getPort();
  }

  interface Body {
    void run() throws InterruptedException;
  }

  static void thread(String name, Body body) {
    Thread thread = new Thread(() -> {
      try {
        body.run();
      } catch (InterruptedException end) {
        Thread.currentThread().interrupt();
      }
    }, name);
    thread.setDaemon(true);
    thread.start();
  }

  static void log(String text, Object... values) {
    System.out.printf("%8.3f %s%n", (System.currentTimeMillis() - STARTED) / 1000.0, String.format(text, values));
  }

  // ------------------------------------------------------------------ control

  private void answer(HttpExchange exchange) throws IOException {
    String query = exchange.getRequestURI().getQuery();
    String answer = "";
    int status = 200;
    try {
      answer = act(exchange.getRequestURI().getPath(), query == null ? "" : query);
    } catch (RuntimeException error) {
      error.printStackTrace();
      status = 400;
    }
    byte[] bytes = answer.getBytes(StandardCharsets.UTF_8);
    exchange.sendResponseHeaders(status, bytes.length == 0 ? -1 : bytes.length);
    exchange.getResponseBody().write(bytes);
    exchange.close();
  }

  private String act(String path, String query) {
    Map<String, String> asked = new HashMap<>();
    for (String part : query.isEmpty() ? new String[0] : query.split("&")) asked.put(part.split("=")[0], part.split("=")[1]);
    Node node = manager.nodes.get(asked.get("node"));
    switch (path) {
      case "/containers":
        return containers();
      case "/applications":
        return applications();
      case "/preempt":
        Allocation container = manager.find(asked.get("container"));
        container.node.stop(container, ContainerExitStatus.PREEMPTED, "Container preempted by scheduler");
        return "";
      case "/decommission":
        decommission(node, Long.parseLong(asked.get("ms")));
        return "";
      case "/lose":
        lose(node, Long.parseLong(asked.get("ms")));
        return "";
      case "/recommission":
        manager.change(node, NodeState.RUNNING);
        return "";
      default:
        throw new IllegalArgumentException(path);
    }
  }

  /** A line for each container: id, host, application, kind, process, whether it has ended, exit code, folder, diagnostics. */
  private String containers() {
    synchronized (manager) {
      return manager.containers.values().stream().map(one -> String.join("\t", one.id.toString(), one.node.id.getHost(),
          one.application.id.toString(), one.id.getContainerId() % (1L << 40) == 1 ? "master" : "executor", String.valueOf(one.pid()),
          String.valueOf(one.ended), String.valueOf(one.code), String.valueOf(one.folder), one.diagnostics)).collect(Collectors.joining("\n"));
    }
  }

  /** A line for each application: id, state, end, attempt, the most containers wanted at a time, and how many it has released. */
  private String applications() {
    synchronized (manager) {
      return manager.applications.values().stream().map(one -> String.join("\t", one.id.toString(), one.state.toString(),
          one.end.toString(), String.valueOf(one.attempt.getAttemptId()), String.valueOf(one.mostWanted),
          String.valueOf(one.released))).collect(Collectors.joining("\n"));
    }
  }

  /** A graceful decommissioning: masters are told, and what has not left by then is ended. */
  private void decommission(Node node, long ms) {
    manager.change(node, NodeState.DECOMMISSIONING);
    thread("decommissioning of " + node.id, () -> {
      long end = System.currentTimeMillis() + ms;
      while (!manager.on(node).isEmpty() && System.currentTimeMillis() < end) Thread.sleep(100);
      manager.change(node, NodeState.DECOMMISSIONED);
      List<Allocation> left = manager.on(node);
      left.forEach(one -> node.kill(one, ContainerExitStatus.ABORTED, "Container released on a decommissioned node"));
    });
  }

  /** A machine dies: its processes at once. The resource manager finds out after a while. */
  private void lose(Node node, long ms) {
    String why = "Container released on a *lost* node";
    List<Allocation> lost = manager.on(node);
    lost.forEach(one -> one.isSilent = true);
    lost.forEach(one -> node.kill(one, ContainerExitStatus.ABORTED, why));
    thread("loss of " + node.id, () -> {
      Thread.sleep(ms);
      manager.change(node, NodeState.LOST);
      for (Allocation one : lost) {
        one.isSilent = false;
        manager.ended(one, ContainerExitStatus.ABORTED, why);
      }
    });
  }
}
