import java.io.ByteArrayOutputStream;
import java.io.DataInputStream;
import java.io.DataOutputStream;
import java.io.IOException;
import java.io.InputStream;
import java.net.InetSocketAddress;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.nio.file.Paths;
import java.util.*;
import java.util.concurrent.TimeUnit;
import org.apache.hadoop.io.DataInputByteBuffer;
import org.apache.hadoop.security.Credentials;
import org.apache.hadoop.yarn.api.ContainerManagementProtocol;
import org.apache.hadoop.yarn.api.protocolrecords.*;
import org.apache.hadoop.yarn.api.records.*;

/** A node manager with the part of the resource manager's view that is its own. Its state is guarded by the resource manager. */
final class Node {
  private static final long KILL_DELAY_MS = 250; // yarn.nodemanager.sleep-delay-before-sigkill.ms
  private static final long MEMORY_WATCH_MS = 500;

  final NodeId id;
  final Resource capacity;
  int usedMemory;
  int usedCores;
  NodeState state = NodeState.RUNNING;
  private final ResourceManager manager;
  private final Path folder;
  private final Path confFolder;
  // Of this process's environment, what containers get: yarn.nodemanager.env-whitelist.
  private final Set<String> inherited;

  Node(ResourceManager manager, String host, Resource capacity, Path folder, Path confFolder, Set<String> inherited) {
    this.manager = manager;
    this.capacity = capacity;
    this.folder = folder.resolve(host);
    this.confFolder = confFolder;
    this.inherited = inherited;
    InetSocketAddress any = new InetSocketAddress(host, 0);
    id = NodeId.newInstance(host, Rpc.serve(ContainerManagementProtocol.class, this, any, manager.conf, null).getPort());
  }

  boolean hasRoom(Resource size) {
    return state == NodeState.RUNNING && capacity.getMemorySize() - usedMemory >= size.getMemorySize()
        && capacity.getVirtualCores() - usedCores >= size.getVirtualCores();
  }

  NodeReport report() {
    return NodeReport.newInstance(id, state, httpAddress(), "/default-rack", Resource.newInstance(usedMemory, usedCores),
        capacity, 0, "", System.currentTimeMillis());
  }

  String httpAddress() {
    return id.getHost() + ":8042";
  }

  // ------------------------------------------------------------------ the protocol between masters and node managers

  StartContainersResponse startContainers(StartContainersRequest request) throws IOException {
    List<ContainerId> started = new ArrayList<>();
    for (StartContainerRequest one : request.getStartContainerRequests()) {
      ByteBuffer token = one.getContainerToken().getIdentifier().duplicate();
      Allocation container = manager.find(StandardCharsets.UTF_8.decode(token).toString());
      started.add(container.id);
      start(container, one.getContainerLaunchContext(), new Credentials(), Map.of());
    }
    return StartContainersResponse.newInstance(new HashMap<>(), started, new HashMap<>());
  }

  StopContainersResponse stopContainers(StopContainersRequest request) {
    for (ContainerId container : request.getContainerIds())
      stop(manager.find(container.toString()), ContainerExitStatus.KILLED_BY_APPMASTER, "Container killed by the ApplicationMaster.");
    return StopContainersResponse.newInstance(request.getContainerIds(), new HashMap<>());
  }

  GetContainerStatusesResponse getContainerStatuses(GetContainerStatusesRequest request) {
    List<ContainerStatus> statuses = new ArrayList<>();
    for (ContainerId id : request.getContainerIds()) {
      Allocation container = manager.find(id.toString());
      ContainerState state = container.ended ? ContainerState.COMPLETE : ContainerState.RUNNING;
      statuses.add(ContainerStatus.newInstance(id, state, container.diagnostics, container.code));
    }
    return GetContainerStatusesResponse.newInstance(statuses, new HashMap<>());
  }

  // ------------------------------------------------------------------ the life of a container

  /** Localize its files, run its command in a session of its own, and tell the resource manager how it has ended. */
  void start(Allocation container, ContainerLaunchContext launch, Credentials own, Map<String, String> variables) {
    StandIn.thread(container.id.toString(), () -> {
      try {
        Process process = launch(container, launch, own, variables);
        if (process == null) return;
        StandIn.thread("memory of " + container.id, () -> watchMemory(container));
        int code = process.waitFor();
        signal("KILL", process.pid()); // what its command has left running
        manager.ended(container, code, code == 0 ? "" : "Container exited with a non-zero exit code " + code + ".");
      } catch (IOException error) {
        manager.ended(container, ContainerExitStatus.INVALID, "Container launch failed: " + error);
      }
    });
  }

  private Process launch(Allocation container, ContainerLaunchContext launch, Credentials own, Map<String, String> variables)
      throws IOException, InterruptedException {
    Path home = Files.createDirectories(folder.resolve(container.id.toString()));
    Path logs = Files.createDirectories(home.resolve("logs"));
    localize(home, launch.getLocalResources());
    ProcessBuilder builder = new ProcessBuilder("setsid", "/bin/bash", script(container, home, logs, launch, variables).toString());
    builder.directory(home.toFile());
    builder.environment().keySet().retainAll(inherited);
    builder.environment().put("HADOOP_TOKEN_FILE_LOCATION", tokens(home, launch, own).toString());
    builder.redirectOutput(logs.resolve("prelaunch.out").toFile()).redirectError(logs.resolve("prelaunch.err").toFile());
    synchronized (manager) {
      container.folder = home;
      if (container.ended || container.forced != null) { // it was taken away before it had begun
        manager.ended(container, ContainerExitStatus.ABORTED, "");
        return null;
      }
      container.process = builder.start(); // setsid becomes the command itself, so this is the session's process
      return container.process;
    }
  }

  private static void localize(Path home, Map<String, LocalResource> resources) throws IOException, InterruptedException {
    for (Map.Entry<String, LocalResource> entry : resources.entrySet()) {
      Path source = Paths.get(entry.getValue().getResource().getFile());
      Path target = home.resolve(entry.getKey());
      Files.createDirectories(target.getParent());
      if (entry.getValue().getType() == LocalResourceType.FILE) {
        Files.createSymbolicLink(target, source);
        continue;
      }
      Files.createDirectories(target);
      boolean isZip = source.toString().endsWith(".zip") || source.toString().endsWith(".jar");
      List<String> unpack = isZip ? List.of("unzip", "-q", source.toString(), "-d", target.toString())
          : List.of("tar", "-xf", source.toString(), "-C", target.toString());
      if (new ProcessBuilder(unpack).inheritIO().start().waitFor() != 0) throw new IOException("cannot unpack " + source);
    }
  }

  private Path script(Allocation container, Path home, Path logs, ContainerLaunchContext launch, Map<String, String> variables)
      throws IOException {
    Map<String, String> environment = new LinkedHashMap<>();
    environment.put("CONTAINER_ID", container.id.toString());
    environment.put("NM_HOST", id.getHost());
    environment.put("NM_PORT", String.valueOf(id.getPort()));
    environment.put("NM_HTTP_PORT", "8042");
    environment.put("LOCAL_DIRS", Files.createDirectories(home.resolve("local")).toString());
    environment.put("LOG_DIRS", logs.toString());
    environment.put("USER", container.application.user);
    environment.put("LOGNAME", container.application.user);
    environment.put("HOME", "/home/");
    environment.put("PWD", home.toString());
    environment.put("JAVA_HOME", System.getProperty("java.home"));
    environment.put("HADOOP_CONF_DIR", confFolder.toString());
    environment.put("SPARK_LOCAL_IP", id.getHost()); // all nodes are this machine: only their addresses differ
    environment.putAll(variables);
    List<Map.Entry<String, String>> given = new ArrayList<>(launch.getEnvironment().entrySet());
    // What refers to other variables comes after them.
    given.sort(Comparator.comparing(entry -> expand(entry.getValue(), logs).contains("$")));
    StringBuilder script = new StringBuilder();
    environment.forEach((name, value) -> export(script, name, value));
    given.forEach(entry -> export(script, entry.getKey(), expand(entry.getValue(), logs)));
    script.append("exec /bin/bash -c \"exec ").append(expand(String.join(" ", launch.getCommands()), logs)).append("\"\n");
    return Files.writeString(home.resolve("launch_container.sh"), script);
  }

  private static void export(StringBuilder script, String name, String value) {
    script.append("export ").append(name).append("=\"").append(value).append("\"\n");
  }

  private static String expand(String text, Path logs) {
    return text.replace("<LOG_DIR>", logs.toString()).replace("<CPS>", ":").replaceAll("\\{\\{(\\w+)}}", "\\$$1");
  }

  private static Path tokens(Path home, ContainerLaunchContext launch, Credentials own) throws IOException {
    Credentials all = new Credentials();
    if (launch.getTokens() != null) {
      DataInputByteBuffer given = new DataInputByteBuffer();
      given.reset(launch.getTokens().duplicate());
      all.readTokenStorageStream(given);
    }
    all.addAll(own);
    ByteArrayOutputStream bytes = new ByteArrayOutputStream();
    all.writeTokenStorageToStream(new DataOutputStream(bytes));
    return Files.write(home.resolve("container_tokens"), bytes.toByteArray());
  }

  private void watchMemory(Allocation container) throws InterruptedException {
    double limit = container.size.getMemorySize() / 1024.0;
    while (container.process.isAlive()) {
      double used = residentGigabytes(container.process.toHandle());
      if (used > limit) {
        stop(container, ContainerExitStatus.KILLED_EXCEEDED_PMEM, String.format(Locale.ROOT,
            "Container [pid=%d,containerID=%s] is running beyond the 'PHYSICAL' memory limit. Current usage: %.1f GB of %.1f GB "
            + "physical memory used; %.1f GB of %.1f GB virtual memory used. Killing container.",
            container.pid(), container.id, used, limit, used, 2.1 * limit));
        return;
      }
      Thread.sleep(MEMORY_WATCH_MS);
    }
  }

  /** What the processes below this one have in memory, pages that several share counted for each: as the node manager counts. */
  private static double residentGigabytes(ProcessHandle top) {
    List<ProcessHandle> all = new ArrayList<>(top.descendants().toList());
    all.add(top);
    long pages = 0;
    for (ProcessHandle one : all) {
      try {
        pages += Long.parseLong(Files.readString(Paths.get("/proc", String.valueOf(one.pid()), "statm")).split(" ")[1]);
      } catch (IOException gone) {
        continue;
      }
    }
    return pages * 4096.0 / (1 << 30);
  }

  /** End a container as a node manager does: SIGTERM to its session, and SIGKILL after a moment. */
  void stop(Allocation container, int code, String why) {
    if (force(container, code, why))
      StandIn.thread("end of " + container.id, () -> {
        signal("TERM", container.pid());
        if (!container.process.waitFor(KILL_DELAY_MS, TimeUnit.MILLISECONDS)) signal("KILL", container.pid());
      });
  }

  /** End a container as its machine's end does. */
  void kill(Allocation container, int code, String why) {
    if (force(container, code, why)) signal("KILL", container.pid());
  }

  private boolean force(Allocation container, int code, String why) {
    synchronized (manager) {
      if (container.ended || container.forced != null) return false;
      container.forced = code;
      container.diagnostics = why;
      StandIn.log("ends %s with %d: %s", container.id, code, why);
      if (container.process == null) manager.ended(container, code, why);
      return container.process != null;
    }
  }

  static void signal(String name, long session) {
    try {
      new ProcessBuilder("kill", "-" + name, "--", "-" + session).redirectError(ProcessBuilder.Redirect.DISCARD).start().waitFor();
    } catch (IOException | InterruptedException error) {
      throw new IllegalStateException(error);
    }
  }
}
