// Publishes what record.py records: for each codec a topic of single messages, one of a batch, and one of a message in chunks.
package main

import (
	"context"
	"log"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
)

var codecs = map[string]pulsar.CompressionType{
	"none": pulsar.NoCompression, "lz4": pulsar.LZ4, "zlib": pulsar.ZLib, "zstd": pulsar.ZSTD, "snappy": pulsar.SNAPPY,
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func open(client pulsar.Client, codec string, shape string) pulsar.Producer {
	options := pulsar.ProducerOptions{
		Topic: "go-" + codec + "-" + shape, Name: "go", CompressionType: codecs[codec],
		DisableBatching: shape != "batched", BatchingMaxPublishDelay: 10 * time.Second,
	}
	if shape == "chunked" {
		options.EnableChunking = true
		options.ChunkMaxMessageSize = 500
	}
	producer, err := client.CreateProducer(options)
	check(err)
	return producer
}

func main() {
	single := []string{strings.Repeat("message 0 ", 20), strings.Repeat("message 1 ", 20), ""}
	var large strings.Builder
	for number := int64(0); number < 400; number++ {
		large.WriteString(strconv.FormatInt(number*number*number, 10) + ",")
	}
	client, err := pulsar.NewClient(pulsar.ClientOptions{URL: os.Args[1]})
	check(err)
	defer client.Close()
	for codec := range codecs {
		for shape, texts := range map[string][]string{"single": single, "batched": single, "chunked": {large.String()}} {
			producer := open(client, codec, shape)
			for _, text := range texts {
				message := &pulsar.ProducerMessage{Payload: []byte(text)}
				if shape == "batched" {
					producer.SendAsync(context.Background(), message, func(_ pulsar.MessageID, _ *pulsar.ProducerMessage, err error) { check(err) })
				} else {
					_, err := producer.Send(context.Background(), message)
					check(err)
				}
			}
			check(producer.FlushWithCtx(context.Background()))
			producer.Close()
		}
	}
}
