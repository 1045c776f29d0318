import java.io.IOException;
import java.net.InetSocketAddress;
import java.nio.charset.StandardCharsets;
import java.util.*;
import org.apache.hadoop.ipc.Server;
import org.apache.hadoop.net.NetUtils;
import org.apache.hadoop.security.Credentials;
import org.apache.hadoop.security.UserGroupInformation;
import org.apache.hadoop.yarn.api.ApplicationClientProtocol;
import org.apache.hadoop.yarn.api.ApplicationMasterProtocol;
import org.apache.hadoop.yarn.api.protocolrecords.*;
import org.apache.hadoop.yarn.api.records.*;
import org.apache.hadoop.yarn.conf.YarnConfiguration;
import org.apache.hadoop.yarn.exceptions.ApplicationAttemptNotFoundException;
import org.apache.hadoop.yarn.exceptions.ApplicationNotFoundException;
import org.apache.hadoop.yarn.exceptions.YarnException;
import org.apache.hadoop.yarn.util.Records;

/** Serves clients and application masters, and gives each application its share of the nodes. One lock for all of its state. */
final class ResourceManager {
  final YarnConfiguration conf;
  final Map<String, Node> nodes = new LinkedHashMap<>();
  final Map<ApplicationId, Application> applications = new LinkedHashMap<>();
  final Map<String, Allocation> containers = new LinkedHashMap<>();
  private final long started = System.currentTimeMillis();
  private final MasterTokens tokens = new MasterTokens();
  final InetSocketAddress clientAddress;
  final InetSocketAddress masterAddress;
  private int lastApplication;

  ResourceManager(YarnConfiguration conf) {
    this.conf = conf;
    InetSocketAddress any = new InetSocketAddress("127.0.0.1", 0);
    clientAddress = NetUtils.getConnectAddress(Rpc.serve(ApplicationClientProtocol.class, this, any, conf, null));
    masterAddress = NetUtils.getConnectAddress(Rpc.serve(ApplicationMasterProtocol.class, this, any, conf, tokens));
  }

  synchronized Allocation find(String container) {
    return containers.get(container);
  }

  // ------------------------------------------------------------------ the protocol between clients and the resource manager

  synchronized GetNewApplicationResponse getNewApplication(GetNewApplicationRequest request) {
    ApplicationId id = ApplicationId.newInstance(started, ++lastApplication);
    GetNewApplicationResponse response = Records.newRecord(GetNewApplicationResponse.class);
    response.setApplicationId(id);
    response.setMaximumResourceCapability(largest());
    return response;
  }

  synchronized SubmitApplicationResponse submitApplication(SubmitApplicationRequest request) throws IOException, YarnException {
    String user = UserGroupInformation.getCurrentUser().getShortUserName();
    int attempts = conf.getInt(YarnConfiguration.RM_AM_MAX_ATTEMPTS, YarnConfiguration.DEFAULT_RM_AM_MAX_ATTEMPTS);
    Application application = new Application(request.getApplicationSubmissionContext(), user, attempts);
    applications.put(application.id, application);
    startMaster(application);
    return Records.newRecord(SubmitApplicationResponse.class);
  }

  synchronized GetApplicationReportResponse getApplicationReport(GetApplicationReportRequest request) throws YarnException {
    Application application = applications.get(request.getApplicationId());
    if (application == null) throw new ApplicationNotFoundException("there is no " + request.getApplicationId());
    return GetApplicationReportResponse.newInstance(application.report());
  }

  synchronized KillApplicationResponse forceKillApplication(KillApplicationRequest request) {
    Application application = applications.get(request.getApplicationId());
    end(application, YarnApplicationState.KILLED, FinalApplicationStatus.KILLED, "Application killed by its client.");
    return KillApplicationResponse.newInstance(true);
  }

  synchronized GetClusterMetricsResponse getClusterMetrics(GetClusterMetricsRequest request) {
    return GetClusterMetricsResponse.newInstance(YarnClusterMetrics.newInstance(nodes.size()));
  }

  synchronized GetClusterNodesResponse getClusterNodes(GetClusterNodesRequest request) {
    return GetClusterNodesResponse.newInstance(nodes.values().stream().map(Node::report).toList());
  }

  GetQueueInfoResponse getQueueInfo(GetQueueInfoRequest request) {
    QueueInfo queue = Records.newRecord(QueueInfo.class);
    queue.setQueueName(request.getQueueName());
    queue.setQueueState(QueueState.RUNNING);
    queue.setChildQueues(new ArrayList<>());
    queue.setApplications(new ArrayList<>());
    return GetQueueInfoResponse.newInstance(queue);
  }

  // ------------------------------------------------------------------ the protocol between masters and the resource manager

  synchronized RegisterApplicationMasterResponse registerApplicationMaster(RegisterApplicationMasterRequest request)
      throws IOException, YarnException {
    Application application = caller();
    application.host = request.getHost();
    application.port = request.getRpcPort();
    application.url = request.getTrackingUrl();
    application.state = YarnApplicationState.RUNNING;
    StandIn.log("the master of %s has registered", application.attempt);
    return RegisterApplicationMasterResponse.newInstance(Resource.newInstance(1, 1), largest(), new HashMap<>(), null,
        new ArrayList<>(), application.context.getQueue(), new ArrayList<>());
  }

  synchronized AllocateResponse allocate(AllocateRequest request) throws IOException, YarnException {
    Application application = caller();
    ResourceBlacklistRequest excluded = request.getResourceBlacklistRequest();
    if (excluded != null) {
      application.excludedHosts.addAll(excluded.getBlacklistAdditions());
      application.excludedHosts.removeAll(excluded.getBlacklistRemovals());
    }
    request.getAskList().forEach(application::ask);
    for (ContainerId id : request.getReleaseList()) {
      Allocation container = find(id.toString());
      if (!container.ended && container.forced == null) application.released++;
      container.node.stop(container, ContainerExitStatus.ABORTED, "Container released by application");
    }
    application.mostWanted = Math.max(application.mostWanted, application.wanted() + running(application));
    List<Container> given = new ArrayList<>();
    List<NMToken> nodeTokens = new ArrayList<>();
    for (Application.Ask ask : application.asks.values()) give(application, ask, given, nodeTokens);
    application.asks.values().removeIf(ask -> ask.wanted == 0);
    AllocateResponse response = AllocateResponse.newInstance(request.getResponseId() + 1, new ArrayList<>(application.completed),
        given, new ArrayList<>(application.changedNodes), Resource.newInstance(0, 0), null, nodes.size(), null, nodeTokens);
    application.completed.clear();
    application.changedNodes.clear();
    return response;
  }

  synchronized FinishApplicationMasterResponse finishApplicationMaster(FinishApplicationMasterRequest request)
      throws IOException, YarnException {
    Application application = caller();
    application.end = request.getFinalApplicationStatus();
    application.diagnostics = Objects.toString(request.getDiagnostics(), "");
    StandIn.log("%s unregisters with %s %s", application.attempt, application.end, application.diagnostics);
    return FinishApplicationMasterResponse.newInstance(true);
  }

  /** The application whose master's token the call has been made with. */
  private Application caller() throws IOException, YarnException {
    String name = UserGroupInformation.getCurrentUser().getUserName();
    ApplicationAttemptId attempt = ApplicationAttemptId.fromString(name);
    Application application = applications.get(attempt.getApplicationId());
    if (application == null || application.isOver() || !attempt.equals(application.attempt))
      throw new ApplicationAttemptNotFoundException(name + " does not run");
    return application;
  }

  // ------------------------------------------------------------------ scheduling

  private Resource largest() {
    long memory = 0;
    int cores = 0;
    for (Node node : nodes.values()) {
      memory = Math.max(memory, node.capacity.getMemorySize());
      cores = Math.max(cores, node.capacity.getVirtualCores());
    }
    return Resource.newInstance(memory, cores);
  }

  private void give(Application application, Application.Ask ask, List<Container> given, List<NMToken> nodeTokens) {
    Resource size = ask.request.getCapability();
    Node node;
    while (ask.wanted > 0 && isNext(application) && (node = emptiest(size, application.excludedHosts)) != null) {
      Allocation container = reserve(application, node, size);
      ask.wanted--;
      Token token = token("ContainerToken", container.id.toString(), node);
      Container one = Container.newInstance(container.id, node.id, node.httpAddress(), size, ask.request.getPriority(), token);
      one.setAllocationRequestId(ask.request.getAllocationRequestId());
      given.add(one);
      if (application.nodesWithToken.add(node.id)) nodeTokens.add(NMToken.newInstance(node.id, token("NMToken", "", node)));
    }
  }

  private static Token token(String kind, String identifier, Node node) {
    return Token.newInstance(identifier.getBytes(StandardCharsets.UTF_8), kind, new byte[0], node.id.toString());
  }

  /** Whether nobody else who waits has less: the fair scheduler, for applications of one queue and containers of one size. */
  private boolean isNext(Application application) {
    return applications.values().stream().filter(other -> other != application && !other.isOver() && other.wanted() > 0)
        .allMatch(other -> running(other) >= running(application));
  }

  private Node emptiest(Resource size, Set<String> excluded) {
    return nodes.values().stream().filter(node -> node.hasRoom(size) && !excluded.contains(node.id.getHost()))
        .min(Comparator.comparingInt(node -> node.usedMemory)).orElse(null);
  }

  private Allocation reserve(Application application, Node node, Resource size) {
    ContainerId id = ContainerId.newContainerId(application.attempt, ++application.containers);
    Allocation container = new Allocation(id, application, node, size);
    node.usedMemory += size.getMemorySize();
    node.usedCores += size.getVirtualCores();
    containers.put(id.toString(), container);
    StandIn.log("gives %s on %s", id, node.id);
    return container;
  }

  /** How many containers an application has, its master not counted. */
  private int running(Application application) {
    return (int) containers.values().stream().filter(one -> one.application == application && !one.ended && !one.isMaster()).count();
  }

  private void startMaster(Application application) throws IOException, YarnException {
    application.beginAttempt();
    Resource size = application.context.getResource();
    Node node = emptiest(size, Set.of());
    if (node == null) throw new YarnException("no node has room for a master of " + size);
    application.master = reserve(application, node, size);
    Credentials credentials = new Credentials();
    var token = tokens.create(application.attempt, masterAddress);
    credentials.addToken(token.getService(), token);
    Map<String, String> variables = Map.of("APP_SUBMIT_TIME_ENV", String.valueOf(application.started),
        "MAX_APP_ATTEMPTS", String.valueOf(application.mostAttempts), "APPLICATION_WEB_PROXY_BASE", "/proxy/" + application.id);
    node.start(application.master, application.context.getAMContainerSpec(), credentials, variables);
  }

  // ------------------------------------------------------------------ what happens

  /** Note that a container has ended, by itself or because it was told to. */
  synchronized void ended(Allocation container, int code, String diagnostics) {
    if (container.ended || container.isSilent) return;
    container.ended = true;
    container.code = container.forced == null ? code : container.forced;
    if (container.forced == null) container.diagnostics = diagnostics;
    container.node.usedMemory -= container.size.getMemorySize();
    container.node.usedCores -= container.size.getVirtualCores();
    StandIn.log("%s has ended with %d %s", container.id, container.code, container.diagnostics);
    Application application = container.application;
    if (application.isOver()) return;
    if (!container.isMaster()) {
      if (container.id.getApplicationAttemptId().equals(application.attempt))
        application.completed.add(ContainerStatus.newInstance(container.id, ContainerState.COMPLETE, container.diagnostics, container.code));
    } else if (application.end != FinalApplicationStatus.UNDEFINED) {
      end(application, YarnApplicationState.FINISHED, application.end, application.diagnostics);
    } else {
      attemptFailed(application, "AM Container for " + application.attempt + " exited with exitCode: " + container.code);
    }
  }

  private void attemptFailed(Application application, String why) {
    if (application.attempt.getAttemptId() >= application.mostAttempts) {
      end(application, YarnApplicationState.FAILED, FinalApplicationStatus.FAILED, why);
      return;
    }
    stopAll(application, "its attempt is over");
    try {
      startMaster(application);
    } catch (IOException | YarnException error) {
      end(application, YarnApplicationState.FAILED, FinalApplicationStatus.FAILED, error.toString());
    }
  }

  private void end(Application application, YarnApplicationState state, FinalApplicationStatus end, String why) {
    if (application.isOver()) return;
    application.finished = System.currentTimeMillis();
    application.state = state;
    application.end = end;
    application.diagnostics = why;
    StandIn.log("%s is over: %s %s %s", application.id, state, end, why);
    stopAll(application, "Application is over");
  }

  private void stopAll(Application application, String why) {
    for (Allocation container : List.copyOf(containers.values()))
      if (container.application == application)
        container.node.stop(container, ContainerExitStatus.KILLED_AFTER_APP_COMPLETION, why);
  }

  /** Change a node's state, of which masters are told with their next heartbeat. */
  synchronized void change(Node node, NodeState state) {
    node.state = state;
    StandIn.log("%s is %s", node.id, state);
    applications.values().forEach(application -> application.changedNodes.add(node.report()));
  }

  synchronized List<Allocation> on(Node node) {
    return containers.values().stream().filter(container -> container.node == node && !container.ended).toList();
  }
}
