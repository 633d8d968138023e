// Package testserver stands in for the package of the same name beside Kubernetes' tests of its storage: instead of
// an etcd within the test it starts the program that SERVER names.
package testserver

import (
	"context"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/kubernetes"
	"go.etcd.io/etcd/server/v3/embed"
	storagetesting "k8s.io/apiserver/pkg/storage/testing"
)

// Time limit for a server to begin to serve.
const startTimeLimit = 60 * time.Second

// Serializes the choice of ports, so that two servers never get the same one.
var starting sync.Mutex

// NewTestConfig returns the settings that a test may change before it starts the server.
func NewTestConfig(t testing.TB) *embed.Config {
	config := embed.NewConfig()
	config.Dir = filepath.Join(t.TempDir(), "data")
	return config
}

// RunEtcd starts a server that ends with the test, and returns a client of it.
func RunEtcd(t testing.TB, config *embed.Config) *kubernetes.Client {
	t.Helper()
	if config == nil {
		config = NewTestConfig(t)
	}
	client, err := kubernetes.New(clientv3.Config{
		Endpoints:   []string{start(t, config)},
		DialTimeout: startTimeLimit,
	})
	if err != nil {
		t.Fatalf("no client: %v", err)
	}
	recorder := storagetesting.NewKubernetesRecorder(client.Kubernetes)
	client.KV = storagetesting.NewKVRecorder(client.KV, recorder)
	client.Kubernetes = recorder
	return client
}

// start starts a server, and returns its URL once it serves.
func start(t testing.TB, config *embed.Config) string {
	starting.Lock()
	defer starting.Unlock()
	clients, peers := free(t), free(t)
	log, err := os.Create(filepath.Join(t.TempDir(), "server.log"))
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	server := exec.Command(os.Getenv("SERVER"),
		"--name=one", "--data-dir="+config.Dir,
		"--listen-client-urls="+clients, "--advertise-client-urls="+clients,
		"--listen-peer-urls="+peers, "--initial-advertise-peer-urls="+peers,
		"--initial-cluster=one="+peers)
	if interval := config.WatchProgressNotifyInterval; interval != 0 {
		server.Args = append(server.Args, "--watch-progress-notify-interval="+interval.String())
	}
	server.Stdout, server.Stderr = log, log
	// The kernel kills the server when the test process ends, whatever the reason.
	server.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := server.Start(); err != nil {
		t.Fatalf("SERVER=%q can't be started: %v", os.Getenv("SERVER"), err)
	}
	t.Cleanup(func() {
		server.Process.Kill()
		server.Wait()
		if t.Failed() {
			said, _ := os.ReadFile(log.Name())
			t.Logf("the server said:\n%s", said)
		}
	})
	if err := serves(clients); err != nil {
		said, _ := os.ReadFile(log.Name())
		t.Fatalf("the server does not serve: %v\n%s", err, said)
	}
	return clients
}

// free returns the URL of a free port.
func free(t testing.TB) string {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	where := url.URL{Scheme: "http", Host: listener.Addr().String()}
	return where.String()
}

// serves waits until a server answers a request that needs a leader.
func serves(at string) error {
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{at}})
	if err != nil {
		return err
	}
	defer client.Close()
	end := time.Now().Add(startTimeLimit)
	for {
		limit, cancel := context.WithTimeout(context.Background(), time.Second)
		_, err := client.Get(limit, "any")
		cancel()
		if err == nil || time.Now().After(end) {
			return err
		}
	}
}
