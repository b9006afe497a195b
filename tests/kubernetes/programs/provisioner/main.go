// Command provisioner creates volumes for the claims of one storage class: directories on the only node.
//
// The volumes are of type "local", not "hostPath": kubelet applies fsGroup to them, so containers without root may write.
// It polls once a second instead of watching: there are few claims, and polling cannot miss an event.
package main

import (
	"context"
	"flag"
	"os"
	"path/filepath"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
)

const (
	name         = "cepheid.local/directory" // the `provisioner` of the StorageClass
	selectedNode = "volume.kubernetes.io/selected-node"
	provisionBy  = "volume.kubernetes.io/storage-provisioner"
	provisioned  = "pv.kubernetes.io/provisioned-by"
)

type provisioner struct {
	client kubernetes.Interface
	root   string
}

// provide creates the directory and the volume of a claim. The volume is named after the claim, so a second attempt is harmless.
func (p provisioner) provide(ctx context.Context, claim *v1.PersistentVolumeClaim, node string) error {
	id := "pvc-" + string(claim.UID)
	path := filepath.Join(p.root, id)
	if err := os.MkdirAll(path, 0o755); err != nil {
		return err
	}
	_, err := p.client.CoreV1().PersistentVolumes().Create(ctx, &v1.PersistentVolume{
		ObjectMeta: metav1.ObjectMeta{Name: id, Annotations: map[string]string{provisioned: name}},
		Spec: v1.PersistentVolumeSpec{
			StorageClassName:              *claim.Spec.StorageClassName,
			PersistentVolumeReclaimPolicy: v1.PersistentVolumeReclaimDelete,
			AccessModes:                   claim.Spec.AccessModes,
			VolumeMode:                    claim.Spec.VolumeMode,
			Capacity:                      v1.ResourceList{v1.ResourceStorage: claim.Spec.Resources.Requests[v1.ResourceStorage]},
			ClaimRef: &v1.ObjectReference{
				Kind: "PersistentVolumeClaim", APIVersion: "v1", Namespace: claim.Namespace, Name: claim.Name, UID: claim.UID,
			},
			PersistentVolumeSource: v1.PersistentVolumeSource{Local: &v1.LocalVolumeSource{Path: path}},
			NodeAffinity: &v1.VolumeNodeAffinity{Required: &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{{
				MatchExpressions: []v1.NodeSelectorRequirement{{
					Key: v1.LabelHostname, Operator: v1.NodeSelectorOpIn, Values: []string{node},
				}},
			}}}},
		},
	}, metav1.CreateOptions{})
	if errors.IsAlreadyExists(err) {
		return nil
	}
	return err
}

func (p provisioner) remove(ctx context.Context, volume *v1.PersistentVolume) error {
	if err := os.RemoveAll(filepath.Join(p.root, volume.Name)); err != nil {
		return err
	}
	return p.client.CoreV1().PersistentVolumes().Delete(ctx, volume.Name, metav1.DeleteOptions{})
}

func (p provisioner) look(ctx context.Context) error {
	claims, err := p.client.CoreV1().PersistentVolumeClaims("").List(ctx, metav1.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return err
	}
	for _, claim := range claims.Items {
		node := claim.Annotations[selectedNode]
		if claim.Annotations[provisionBy] == name && node != "" && claim.Spec.VolumeName == "" && claim.DeletionTimestamp == nil {
			if err := p.provide(ctx, &claim, node); err != nil {
				klog.ErrorS(err, "no volume for claim", "namespace", claim.Namespace, "claim", claim.Name)
			}
		}
	}
	volumes, err := p.client.CoreV1().PersistentVolumes().List(ctx, metav1.ListOptions{ResourceVersion: "0"})
	if err != nil {
		return err
	}
	for _, volume := range volumes.Items {
		if volume.Annotations[provisioned] == name && volume.Status.Phase == v1.VolumeReleased &&
			volume.Spec.PersistentVolumeReclaimPolicy == v1.PersistentVolumeReclaimDelete {
			if err := p.remove(ctx, &volume); err != nil {
				klog.ErrorS(err, "volume not removed", "volume", volume.Name)
			}
		}
	}
	return nil
}

func main() {
	kubeconfig := flag.String("kubeconfig", "", "how to reach the API server")
	root := flag.String("root", "", "folder that holds the volumes")
	flag.Parse()
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		klog.Fatal(err)
	}
	p := provisioner{client: kubernetes.NewForConfigOrDie(config), root: *root}
	for ; ; time.Sleep(time.Second) {
		if err := p.look(context.Background()); err != nil {
			klog.ErrorS(err, "API server not reachable")
		}
	}
}
