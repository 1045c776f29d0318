import java.util.ArrayList;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.hadoop.yarn.api.records.*;
import org.apache.hadoop.yarn.util.Records;

/** What the resource manager knows of an application. Guarded by the resource manager. */
final class Application {
  final ApplicationId id;
  final ApplicationSubmissionContext context;
  final String user;
  final int mostAttempts;
  final long started = System.currentTimeMillis();
  long finished;
  YarnApplicationState state = YarnApplicationState.ACCEPTED;
  FinalApplicationStatus end = FinalApplicationStatus.UNDEFINED;
  String diagnostics = "";

  // Of the present attempt.
  ApplicationAttemptId attempt;
  Allocation master;
  String host = "N/A";
  int port = -1;
  String url = "N/A";
  long containers;
  final Map<String, Ask> asks = new LinkedHashMap<>();
  final List<ContainerStatus> completed = new ArrayList<>();
  final List<NodeReport> changedNodes = new ArrayList<>();
  final Set<NodeId> nodesWithToken = new HashSet<>();
  final Set<String> excludedHosts = new HashSet<>();

  // For tests.
  int mostWanted;
  int released;

  /** Containers of one kind that are still wanted. */
  static final class Ask {
    final ResourceRequest request;
    int wanted;

    Ask(ResourceRequest request) {
      this.request = request;
      wanted = request.getNumContainers();
    }
  }

  Application(ApplicationSubmissionContext context, String user, int mostAttempts) {
    id = context.getApplicationId();
    this.context = context;
    this.user = user;
    int own = context.getMaxAppAttempts();
    this.mostAttempts = own > 0 ? Math.min(own, mostAttempts) : mostAttempts;
  }

  boolean isOver() {
    return finished != 0;
  }

  void beginAttempt() {
    attempt = ApplicationAttemptId.newInstance(id, attempt == null ? 1 : attempt.getAttemptId() + 1);
    state = YarnApplicationState.ACCEPTED;
    host = url = "N/A";
    port = -1;
    containers = 0;
    asks.clear();
    completed.clear();
    changedNodes.clear();
    nodesWithToken.clear();
    excludedHosts.clear();
  }

  void ask(ResourceRequest request) {
    if (!ResourceRequest.ANY.equals(request.getResourceName())) return; // names of machines and racks are wishes
    String kind = request.getPriority() + "/" + request.getAllocationRequestId() + "/" + request.getCapability();
    if (request.getNumContainers() == 0) asks.remove(kind);
    else asks.put(kind, new Ask(request));
  }

  int wanted() {
    return asks.values().stream().mapToInt(ask -> ask.wanted).sum();
  }

  ApplicationReport report() {
    ApplicationReport report = Records.newRecord(ApplicationReport.class);
    report.setApplicationId(id);
    report.setCurrentApplicationAttemptId(attempt);
    report.setApplicationType(context.getApplicationType());
    report.setName(context.getApplicationName());
    report.setUser(user);
    report.setQueue(context.getQueue());
    report.setHost(host);
    report.setRpcPort(port);
    report.setTrackingUrl(url);
    report.setOriginalTrackingUrl(url);
    report.setYarnApplicationState(state);
    report.setFinalApplicationStatus(end);
    report.setDiagnostics(diagnostics);
    report.setStartTime(started);
    report.setFinishTime(finished);
    return report;
  }
}
