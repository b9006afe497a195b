import java.util.concurrent.TimeUnit;
import org.apache.pulsar.client.api.CompressionType;
import org.apache.pulsar.client.api.Producer;
import org.apache.pulsar.client.api.ProducerBuilder;
import org.apache.pulsar.client.api.PulsarClient;
import org.apache.pulsar.client.api.Schema;

/** Publishes what record.py records: for each codec a topic of single messages, one of a batch, and one of a message in chunks. */
public class RecordedProducer {
    static final String[] SINGLE = {"message 0 ".repeat(20), "message 1 ".repeat(20), ""};

    static Producer<byte[]> open(PulsarClient client, CompressionType codec, String shape) throws Exception {
        ProducerBuilder<byte[]> builder = client.newProducer(Schema.BYTES)
            .topic("java-" + codec.name().toLowerCase() + "-" + shape)
            .producerName("java")
            .compressionType(codec)
            .enableBatching(shape.equals("batched"))
            .batchingMaxPublishDelay(10, TimeUnit.SECONDS);
        if (shape.equals("chunked")) {
            builder.enableChunking(true).chunkMaxMessageSize(500);
        }
        return builder.create();
    }

    public static void main(String[] arguments) throws Exception {
        StringBuilder large = new StringBuilder();
        for (int number = 0; number < 400; number++) {
            large.append((long) number * number * number).append(',');
        }
        try (PulsarClient client = PulsarClient.builder().serviceUrl(arguments[0]).build()) {
            for (CompressionType codec : CompressionType.values()) {
                try (var single = open(client, codec, "single")) {
                    for (String text : SINGLE) {
                        single.send(text.getBytes());
                    }
                }
                try (var batched = open(client, codec, "batched")) {
                    for (String text : SINGLE) {
                        batched.sendAsync(text.getBytes());
                    }
                    batched.flush();
                }
                try (var chunked = open(client, codec, "chunked")) {
                    chunked.send(large.toString().getBytes());
                }
            }
        }
    }
}
