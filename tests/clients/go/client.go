// The common flags, and clients made from them. Every client reports what clientv3 hides (wire.go).
package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/encoding/gzip"
)

type options struct {
	endpoints, user, passwordFile string
	cacert, cert, key             string
	skipVerify, gzip              bool
	loginTimeout, autoSync        time.Duration
	prefix                        string
}

func (o *options) bind(flags *flag.FlagSet, prefix string) {
	flags.StringVar(&o.endpoints, "endpoints", "127.0.0.1:2379", "host:port[,host:port]; TLS if a TLS flag is given")
	flags.StringVar(&o.user, "user", "", "etcd user; none: no login")
	flags.StringVar(&o.passwordFile, "password-file", "", "file that holds the user's password")
	flags.StringVar(&o.cacert, "cacert", "", "CA that signs the server's certificate")
	flags.StringVar(&o.cert, "cert", "", "client certificate")
	flags.StringVar(&o.key, "key", "", "key of the client certificate")
	flags.BoolVar(&o.skipVerify, "insecure-skip-tls-verify", false, "TLS without checking the server's certificate")
	flags.BoolVar(&o.gzip, "gzip", false, "compress requests with gzip")
	flags.DurationVar(&o.loginTimeout, "login-timeout", 30*time.Second, "limit of one login")
	flags.DurationVar(&o.autoSync, "auto-sync", 0, "how often the endpoints are replaced by those of the member list; 0: never, as by default")
	flags.StringVar(&o.prefix, "prefix", prefix, "where the scenario's keys live")
}

// Dial connects and logs in as the user of the flags.
func (o *options) dial() (*clientv3.Client, error) { return o.dialTo(o.endpoints) }

func (o *options) dialTo(endpoints string) (*clientv3.Client, error) {
	password := ""
	if o.user != "" {
		text, err := os.ReadFile(o.passwordFile)
		if err != nil {
			return nil, fmt.Errorf("password file: %w", err)
		}
		password = strings.TrimRight(string(text), "\r\n")
	}
	return o.dialAs(endpoints, o.user, password)
}

func (o *options) dialAs(endpoints, user, password string) (*clientv3.Client, error) {
	secure, err := o.tls()
	if err != nil {
		return nil, err
	}
	// Chained interceptors run inside clientv3's own, once per attempt.
	dialing := []grpc.DialOption{
		grpc.WithChainUnaryInterceptor(seen.unary),
		grpc.WithChainStreamInterceptor(seen.stream),
	}
	if o.gzip {
		dialing = append(dialing, grpc.WithDefaultCallOptions(grpc.UseCompressor(gzip.Name)))
	}
	if o.autoSync > 0 {
		dialing = append(dialing, grpc.WithContextDialer(seen.dial))
	}
	return clientv3.New(clientv3.Config{
		Endpoints:        strings.Split(endpoints, ","),
		Username:         user,
		Password:         password,
		TLS:              secure,
		DialTimeout:      o.loginTimeout,
		AutoSyncInterval: o.autoSync,
		DialOptions:      dialing,
	})
}

// DialSome makes several clients, each with a connection and a token of its own.
func (o *options) dialSome(count int) ([]*clientv3.Client, error) {
	clients := make([]*clientv3.Client, count)
	for i := range clients {
		client, err := o.dial()
		if err != nil {
			return nil, err
		}
		clients[i] = client
	}
	return clients, nil
}

func (o *options) tls() (*tls.Config, error) {
	if o.cacert == "" && o.cert == "" && !o.skipVerify {
		return nil, nil
	}
	config := &tls.Config{InsecureSkipVerify: o.skipVerify}
	if o.cacert != "" {
		text, err := os.ReadFile(o.cacert)
		if err != nil {
			return nil, err
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(text) {
			return nil, errors.New("no certificate in " + o.cacert)
		}
	}
	if o.cert != "" {
		pair, err := tls.LoadX509KeyPair(o.cert, o.key)
		if err != nil {
			return nil, err
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}
