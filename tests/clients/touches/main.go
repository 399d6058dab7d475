// touches reads requests from stdin and writes, for each, what etcd touches for it: the keys that it reads, writes and watches, the leases
// whose keys it asks about, and the parts of the cluster. The requests are decoded by etcd's own generated types.
//
// It owns the records on stdin and stdout. README.md describes both.
package main

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
)

// The largest body taken: far above any that the test makes.
const largestBody = 16 << 20

func main() {
	var err error
	switch {
	case len(os.Args) == 1:
		err = serve(bufio.NewReaderSize(os.Stdin, 1<<20), bufio.NewWriterSize(os.Stdout, 1<<20))
	case len(os.Args) == 2 && os.Args[1] == "schema":
		err = writeSchema(os.Stdout)
	default:
		err = errors.New("usage: touches [schema]")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "touches:", err)
		os.Exit(1)
	}
}

// serve answers each record with a line, and flushes where the next record has not come yet.
func serve(in *bufio.Reader, out *bufio.Writer) error {
	for {
		path, body, err := readRecord(in)
		if err == io.EOF {
			return out.Flush()
		}
		if err != nil {
			return err
		}
		if _, err := fmt.Fprintln(out, answer(path, body)); err != nil {
			return err
		}
		if in.Buffered() == 0 {
			if err := out.Flush(); err != nil {
				return err
			}
		}
	}
}

// readRecord reads the length of the path (2 bytes, big endian), the path, the length of the body (4 bytes) and the body.
func readRecord(in io.Reader) (string, []byte, error) {
	var length [2]byte
	if _, err := io.ReadFull(in, length[:]); err != nil {
		return "", nil, err
	}
	path := make([]byte, binary.BigEndian.Uint16(length[:]))
	if _, err := io.ReadFull(in, path); err != nil {
		return "", nil, err
	}
	var size [4]byte
	if _, err := io.ReadFull(in, size[:]); err != nil {
		return "", nil, err
	}
	if binary.BigEndian.Uint32(size[:]) > largestBody {
		return "", nil, errors.New("a body too large")
	}
	body := make([]byte, binary.BigEndian.Uint32(size[:]))
	_, err := io.ReadFull(in, body)
	return string(path), body, err
}

func answer(path string, body []byte) string {
	method, known := methods[path]
	if !known {
		return "unknown method"
	}
	request := method.request()
	if err := decode(body, request); err != nil {
		return "undecodable"
	}
	var seen touches
	method.visit(request, &seen)
	return strings.Join(append([]string{"touches"}, seen...), "\t")
}
