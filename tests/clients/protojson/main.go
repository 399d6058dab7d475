// protojson reads what Keyward's JSON face accepted and wrote, and compares the meaning with Go's own readers and writers of JSON on etcd's
// generated types.
//
// It owns the records on stdin and the lines on stdout. README.md describes both.
package main

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/golang/protobuf/jsonpb"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	_ "go.etcd.io/etcd/api/v3/etcdserverpb"
	_ "go.etcd.io/etcd/server/v3/etcdserver/api/v3election/v3electionpb"
	_ "go.etcd.io/etcd/server/v3/etcdserver/api/v3lock/v3lockpb"
)

// The largest part of a record taken: far above any that the test makes.
const largestPart = 16 << 20

func main() {
	if len(os.Args) != 1 {
		fmt.Fprintln(os.Stderr, "usage: protojson")
		os.Exit(1)
	}
	if err := serve(bufio.NewReaderSize(os.Stdin, 1<<20), bufio.NewWriterSize(os.Stdout, 1<<20)); err != nil {
		fmt.Fprintln(os.Stderr, "protojson:", err)
		os.Exit(1)
	}
}

// serve answers each record with a line, and flushes where the next record has not come yet.
func serve(in *bufio.Reader, out *bufio.Writer) error {
	for {
		var parts [4][]byte
		for i := range parts {
			part, err := readPart(in)
			if err == io.EOF && i == 0 {
				return out.Flush()
			}
			if err != nil {
				return err
			}
			parts[i] = part
		}
		line := strings.ReplaceAll(answer(string(parts[0]), string(parts[1]), parts[2], parts[3]), "\n", " ")
		if _, err := fmt.Fprintln(out, line); err != nil {
			return err
		}
		if in.Buffered() == 0 {
			if err := out.Flush(); err != nil {
				return err
			}
		}
	}
}

// readPart reads a length (4 bytes, big endian) and as many bytes.
func readPart(in io.Reader) ([]byte, error) {
	var size [4]byte
	if _, err := io.ReadFull(in, size[:]); err != nil {
		return nil, err
	}
	length := binary.BigEndian.Uint32(size[:])
	if length > largestPart {
		return nil, errors.New("a part too large")
	}
	part := make([]byte, length)
	if _, err := io.ReadFull(in, part); err != nil {
		return nil, io.ErrUnexpectedEOF
	}
	return part, nil
}

func answer(kind, name string, text, body []byte) string {
	found, err := protoregistry.GlobalTypes.FindMessageByName(protoreflect.FullName(name))
	if err != nil {
		return "unknown message"
	}
	ours := found.New().Interface()
	if err := proto.Unmarshal(body, ours); err != nil {
		return "undecodable " + err.Error()
	}
	switch kind {
	case "request":
		return request(found, ours, text)
	case "v1":
		written, err := (&jsonpb.Marshaler{OrigName: true}).MarshalToString(protoadapt.MessageV1Of(ours))
		return compareText([]byte(written), text, err)
	case "v2":
		written, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(ours)
		return compareText(written, text, err)
	case "v2 stream":
		written, err := protojson.MarshalOptions{UseProtoNames: true}.Marshal(ours)
		if err == nil {
			written, err = json.Marshal(json.RawMessage(written))
		}
		return compareText(written, text, err)
	}
	return "unknown kind"
}

// request reads the document as grpc-gateway v2 does, then as v1 does, and compares each with Keyward's message.
func request(kind protoreflect.MessageType, ours proto.Message, text []byte) string {
	v2 := kind.New().Interface()
	var refused error
	if len(bytes.Trim(text, " \t\r\n")) > 0 {
		refused = (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(text, v2)
	}
	if refused == nil && !same(v2, ours) {
		return fmt.Sprintf("differs %v", v2)
	}
	v1 := kind.New().Interface()
	reader := jsonpb.Unmarshaler{AllowUnknownFields: true}
	err := reader.UnmarshalNext(json.NewDecoder(bytes.NewReader(text)), protoadapt.MessageV1Of(v1))
	isRead := err == nil || err == io.EOF
	switch {
	case isRead && !same(v1, ours):
		return fmt.Sprintf("differs in v1 %v", v1)
	case isRead && refused == nil:
		return "same"
	case isRead && isBase64(refused):
		return "same, refused by v2"
	case isRead || !isBase64(refused) && refused != nil:
		return "refused " + refused.Error()
	case refused != nil:
		// One has another form of base64 than the other takes.
		return "refused by each for base64"
	}
	return "same, refused by v1"
}

// isBase64 tells if protojson refused the text of bytes.
func isBase64(err error) bool {
	return err != nil && strings.Contains(err.Error(), "invalid value for bytes field")
}

// same compares by the bytes of one deterministic encoder.
func same(a, b proto.Message) bool {
	encoder := proto.MarshalOptions{Deterministic: true}
	x, errX := encoder.Marshal(a)
	y, errY := encoder.Marshal(b)
	return errX == nil && errY == nil && bytes.Equal(x, y)
}

// compareText compares with what Go wrote, without the spaces that protojson adds by chance.
func compareText(written, ours []byte, err error) string {
	if err != nil {
		return "unwritten " + err.Error()
	}
	var compact bytes.Buffer
	if err := json.Compact(&compact, written); err != nil {
		return "unwritten " + err.Error()
	}
	if !bytes.Equal(compact.Bytes(), ours) {
		return "differs " + compact.String()
	}
	return "same"
}
