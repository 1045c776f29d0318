import java.nio.file.Path;
import org.apache.hadoop.yarn.api.records.ContainerId;
import org.apache.hadoop.yarn.api.records.Resource;

/** A container: room on a node, and from its start on a session of processes. Guarded by the resource manager. */
final class Allocation {
  final ContainerId id;
  final Application application;
  final Node node;
  final Resource size;
  Path folder;
  Process process;
  boolean ended;
  int code;
  String diagnostics = "";
  // Why the manager ends it, once it does; else the exit code of its process counts.
  Integer forced;
  // Its machine cannot tell that it has ended.
  volatile boolean isSilent;

  Allocation(ContainerId id, Application application, Node node, Resource size) {
    this.id = id;
    this.application = application;
    this.node = node;
    this.size = size;
  }

  boolean isMaster() {
    return application.master == this;
  }

  long pid() {
    return process == null ? 0 : process.pid();
  }
}
