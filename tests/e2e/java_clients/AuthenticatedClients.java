// Uses the official Java clients with one kind of credentials: the admin client lists namespaces, the other one publishes and reads.
// Arguments: service URL, admin URL, file of the CA, class of the authentication plug-in, its parameters, topic.
// Prints "listed NAMESPACES", "received TEXT", or the class of the exception and its message.

import org.apache.pulsar.client.admin.PulsarAdmin;
import org.apache.pulsar.client.admin.PulsarAdminException;
import org.apache.pulsar.client.api.Authentication;
import org.apache.pulsar.client.api.AuthenticationFactory;
import org.apache.pulsar.client.api.Consumer;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.PulsarClientException;
import org.apache.pulsar.client.api.Schema;
import org.apache.pulsar.client.api.SubscriptionInitialPosition;

public class AuthenticatedClients {
    public static void main(String[] arguments) throws Exception {
        String serviceUrl = arguments[0], adminUrl = arguments[1], ca = arguments[2];
        String plugin = arguments[3], parameters = arguments[4], topic = arguments[5];
        try (PulsarAdmin admin = PulsarAdmin.builder().serviceHttpUrl(adminUrl).tlsTrustCertsFilePath(ca)
                .authentication(plugin, parameters).build()) {
            System.out.println("listed " + admin.namespaces().getNamespaces("public"));
        } catch (PulsarAdminException error) {
            System.out.println(error.getClass().getSimpleName() + " " + error.getMessage());
        }
        Authentication authentication = AuthenticationFactory.create(plugin, parameters);
        try (PulsarClient client = PulsarClient.builder().serviceUrl(serviceUrl).tlsTrustCertsFilePath(ca)
                .authentication(authentication).build()) {
            try (Producer<String> producer = client.newProducer(Schema.STRING).topic(topic).create()) {
                producer.send("hello");
            }
            try (Consumer<String> consumer = client.newConsumer(Schema.STRING).topic(topic).subscriptionName("s")
                    .subscriptionInitialPosition(SubscriptionInitialPosition.Earliest).subscribe()) {
                System.out.println("received " + consumer.receive().getValue());
            }
        } catch (PulsarClientException error) {
            System.out.println(error.getClass().getSimpleName() + " " + error.getMessage());
        }
        System.exit(0); // threads of the clients may still run
    }
}
