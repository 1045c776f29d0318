import java.net.InetSocketAddress;
import javax.crypto.SecretKey;
import org.apache.hadoop.security.SecurityUtil;
import org.apache.hadoop.security.token.SecretManager;
import org.apache.hadoop.security.token.Token;
import org.apache.hadoop.yarn.api.records.ApplicationAttemptId;
import org.apache.hadoop.yarn.security.AMRMTokenIdentifier;

/** The tokens by which the resource manager knows which attempt of which application a call is from. */
final class MasterTokens extends SecretManager<AMRMTokenIdentifier> {
  private final SecretKey key = generateSecret();

  Token<AMRMTokenIdentifier> create(ApplicationAttemptId attempt, InetSocketAddress service) {
    Token<AMRMTokenIdentifier> token = new Token<>(new AMRMTokenIdentifier(attempt, 1), this);
    SecurityUtil.setTokenService(token, service);
    return token;
  }

  @Override
  protected byte[] createPassword(AMRMTokenIdentifier identifier) {
    return createPassword(identifier.getBytes(), key);
  }

  @Override
  public byte[] retrievePassword(AMRMTokenIdentifier identifier) {
    return createPassword(identifier);
  }

  @Override
  public AMRMTokenIdentifier createIdentifier() {
    return new AMRMTokenIdentifier();
  }
}
