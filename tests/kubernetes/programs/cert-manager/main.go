// Command cert-manager runs cert-manager's own controllers and its webhook in one process.
//
// The programs of cert-manager are modules without a version of their own, so a module proxy cannot serve them. This file starts
// the packages they consist of. Left out are the parts that need the internet (ACME) or other products (Vault, Venafi).
package main

import (
	"context"
	"flag"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/klog/v2"

	"github.com/cert-manager/cert-manager/internal/apis/config/shared"
	config "github.com/cert-manager/cert-manager/internal/apis/config/webhook"
	"github.com/cert-manager/cert-manager/internal/webhook"
	"github.com/cert-manager/cert-manager/pkg/controller"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificaterequests/approver"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificaterequests/ca"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificaterequests/selfsigned"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/issuing"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/keymanager"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/readiness"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/requestmanager"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/revisionmanager"
	_ "github.com/cert-manager/cert-manager/pkg/controller/certificates/trigger"
	_ "github.com/cert-manager/cert-manager/pkg/controller/issuers"
	_ "github.com/cert-manager/cert-manager/pkg/issuer/ca"
	_ "github.com/cert-manager/cert-manager/pkg/issuer/selfsigned"
)

const workers = 2

func main() {
	namespace := flag.String("namespace", "cert-manager", "namespace of this program")
	flag.Parse()
	ctx, stop := signal.NotifyContext(klog.NewContext(context.Background(), klog.Background()), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	group, ctx := errgroup.WithContext(ctx)
	if err := startControllers(ctx, group, *namespace); err != nil {
		klog.Fatal(err)
	}
	if err := startWebhook(ctx, group, *namespace); err != nil {
		klog.Fatal(err)
	}
	if err := group.Wait(); err != nil {
		klog.Fatal(err)
	}
}

// startControllers starts every controller that the imports above registered.
func startControllers(ctx context.Context, group *errgroup.Group, namespace string) error {
	factory, err := controller.NewContextFactory(ctx, controller.ContextOptions{
		KubernetesAPIQPS:   50,
		KubernetesAPIBurst: 100,
		IssuerOptions:      controller.IssuerOptions{ClusterResourceNamespace: namespace},
	})
	if err != nil {
		return err
	}
	for name, build := range controller.Known() {
		one, err := build(factory)
		if err != nil {
			return err
		}
		klog.InfoS("starting", "controller", name)
		group.Go(func() error { return one.Run(workers, ctx) })
	}
	all, err := factory.Build()
	if err != nil {
		return err
	}
	all.SharedInformerFactory.Start(ctx.Done()) // after the controllers, which register what they watch
	all.KubeSharedInformerFactory.Start(ctx.Done())
	return nil
}

// startWebhook serves the checks of Certificates. The CA of its certificate is in the Secret cert-manager-webhook-ca.
func startWebhook(ctx context.Context, group *errgroup.Group, namespace string) error {
	server, err := webhook.NewCertManagerWebhookServer(klog.Background(), config.WebhookConfiguration{
		SecurePort:           10250,
		HealthzPort:          6080,
		MetricsListenAddress: "0",
		TLSConfig: shared.TLSConfig{Dynamic: shared.DynamicServingConfig{
			SecretNamespace: namespace,
			SecretName:      "cert-manager-webhook-ca",
			DNSNames:        []string{"cert-manager-webhook." + namespace + ".svc"},
			LeafDuration:    7 * 24 * time.Hour,
		}},
	})
	if err != nil {
		return err
	}
	group.Go(func() error { return server.Run(ctx) })
	return nil
}
