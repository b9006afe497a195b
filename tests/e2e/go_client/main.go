// Publishes and consumes one message over TLS, with credentials given as the official Go client's own options give them.
package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
)

// Arguments: service URL, CA file, topic, kind of credentials, and the texts that this kind takes.
func main() {
	url, caFile, topic, kind, given := os.Args[1], os.Args[2], os.Args[3], os.Args[4], os.Args[5:]
	received, err := exchange(url, caFile, topic, kind, given)
	if err != nil {
		fmt.Printf("failed: %q\n", err)
		return
	}
	fmt.Printf("received: %s\n", received)
}

func authentication(kind string, given []string) (pulsar.Authentication, error) {
	switch kind {
	case "token":
		return pulsar.NewAuthenticationTokenFromFile(given[0]), nil
	case "basic":
		return pulsar.NewAuthenticationBasic(given[0], given[1])
	case "certificate":
		return pulsar.NewAuthenticationTLS(given[0], given[1]), nil
	case "oauth2":
		return pulsar.NewAuthenticationOAuth2(map[string]string{
			"type": "client_credentials", "issuerUrl": given[0], "privateKey": given[1], "audience": given[2], "clientId": "app",
		}), nil
	case "none":
		return nil, nil
	}
	return nil, fmt.Errorf("unknown kind %q", kind)
}

func exchange(url, caFile, topic, kind string, given []string) (string, error) {
	auth, err := authentication(kind, given)
	if err != nil {
		return "", err
	}
	client, err := pulsar.NewClient(pulsar.ClientOptions{
		URL: url, TLSTrustCertsFilePath: caFile, TLSValidateHostname: true, Authentication: auth,
		OperationTimeout: 10 * time.Second, ConnectionTimeout: 10 * time.Second,
	})
	if err != nil {
		return "", err
	}
	defer client.Close()
	consumer, err := client.Subscribe(pulsar.ConsumerOptions{Topic: topic, SubscriptionName: "s"})
	if err != nil {
		return "", err
	}
	defer consumer.Close()
	producer, err := client.CreateProducer(pulsar.ProducerOptions{Topic: topic})
	if err != nil {
		return "", err
	}
	defer producer.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	if _, err = producer.Send(ctx, &pulsar.ProducerMessage{Payload: []byte("from go as " + kind)}); err != nil {
		return "", err
	}
	message, err := consumer.Receive(ctx)
	if err != nil {
		return "", err
	}
	return string(message.Payload()), consumer.Ack(message)
}
