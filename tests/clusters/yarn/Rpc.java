import java.io.IOException;
import java.lang.reflect.InvocationTargetException;
import java.lang.reflect.Method;
import java.lang.reflect.Proxy;
import java.net.InetSocketAddress;
import org.apache.hadoop.conf.Configuration;
import org.apache.hadoop.ipc.Server;
import org.apache.hadoop.security.token.SecretManager;
import org.apache.hadoop.security.token.TokenIdentifier;
import org.apache.hadoop.yarn.exceptions.YarnException;
import org.apache.hadoop.yarn.ipc.YarnRPC;

/** Hadoop's own server for one of YARN's protocols. It serves those methods that the handler has, and refuses the others by name. */
final class Rpc {
  private static final int HANDLERS = 4;

  static Server serve(Class<?> protocol, Object handler, InetSocketAddress at, Configuration conf,
      SecretManager<? extends TokenIdentifier> secrets) {
    Object served = Proxy.newProxyInstance(Rpc.class.getClassLoader(), new Class<?>[] {protocol},
        (proxy, method, arguments) -> method.getDeclaringClass() == Object.class
            ? method.invoke(handler, arguments) : call(handler, method, arguments));
    Server server = YarnRPC.create(conf).getServer(protocol, served, at, conf, secrets, HANDLERS);
    server.start();
    return server;
  }

  private static Object call(Object handler, Method method, Object[] arguments) throws Throwable {
    Method own;
    try {
      own = handler.getClass().getDeclaredMethod(method.getName(), method.getParameterTypes());
    } catch (NoSuchMethodException none) {
      throw new YarnException("this stand-in does not serve " + method.getName());
    }
    try {
      return own.invoke(handler, arguments);
    } catch (InvocationTargetException thrown) {
      Throwable cause = thrown.getCause();
      if (cause instanceof YarnException || cause instanceof IOException) throw cause;
      cause.printStackTrace();
      throw new YarnException(cause);
    }
  }
}
