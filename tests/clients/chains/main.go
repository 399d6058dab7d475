// chains says of certificates whether Go's crypto/x509 verifies them as etcd asks it to: crypto/tls with ClientCAs and
// RequireAndVerifyClientCert for clients (client/pkg/transport/listener.go, ServerConfig), and RootCAs with a server name for members.
//
// A line of stdin is {"roots": […], "chain": […], "now": …, "host": …}, certificates as base64 of DER, leaf first. A line of stdout is
// {"client": "", "server": ""}: empty where accepted, else Go's reason.
package main

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"os"
	"time"
)

type question struct {
	Roots [][]byte `json:"roots"`
	Chain [][]byte `json:"chain"`
	Now   int64    `json:"now"`
	Host  string   `json:"host"`
}

type answer struct {
	Client string `json:"client"`
	Server string `json:"server"`
}

func main() {
	in := bufio.NewReaderSize(os.Stdin, 1<<20)
	out := bufio.NewWriter(os.Stdout)
	defer out.Flush()
	questions, answers := json.NewDecoder(in), json.NewEncoder(out)
	for {
		var asked question
		if err := questions.Decode(&asked); err != nil {
			break
		}
		if err := answers.Encode(answer{Client: verdict(asked, true), Server: verdict(asked, false)}); err != nil {
			panic(err)
		}
	}
}

func verdict(asked question, client bool) string {
	if err := verify(asked, client); err != nil {
		return err.Error()
	}
	return ""
}

// verify is processCertsFromClient and verifyServerCertificate of crypto/tls.
func verify(asked question, client bool) error {
	roots := x509.NewCertPool()
	for _, der := range asked.Roots {
		root, err := x509.ParseCertificate(der)
		if err != nil {
			return fmt.Errorf("a root: %w", err)
		}
		roots.AddCert(root)
	}
	chain := make([]*x509.Certificate, len(asked.Chain))
	for i, der := range asked.Chain {
		certificate, err := x509.ParseCertificate(der)
		if err != nil {
			return fmt.Errorf("certificate %d: %w", i, err)
		}
		chain[i] = certificate
	}
	options := x509.VerifyOptions{Roots: roots, CurrentTime: time.Unix(asked.Now, 0), Intermediates: x509.NewCertPool()}
	if client {
		options.KeyUsages = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}
	} else {
		options.DNSName = asked.Host
	}
	for _, certificate := range chain[1:] {
		options.Intermediates.AddCert(certificate)
	}
	if _, err := chain[0].Verify(options); err != nil {
		return err
	}
	switch chain[0].PublicKey.(type) {
	case *ecdsa.PublicKey, *rsa.PublicKey, ed25519.PublicKey:
		return nil
	default:
		return fmt.Errorf("unsupported public key %T", chain[0].PublicKey)
	}
}
