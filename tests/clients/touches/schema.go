package main

import (
	"bufio"
	"fmt"
	"io"
	"slices"

	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// writeSchema writes a line for each request, `request PATH MESSAGE`, and a line for each field of each message in a request, `field MESSAGE
// NUMBER KIND`, as etcd's types have them.
func writeSchema(to io.Writer) error {
	out := bufio.NewWriter(to)
	paths := make([]string, 0, len(methods))
	for path := range methods {
		paths = append(paths, path)
	}
	slices.Sort(paths)
	written := map[protoreflect.FullName]bool{}
	for _, path := range paths {
		message := protoadapt.MessageV2Of(methods[path].request()).ProtoReflect().Descriptor()
		fmt.Fprintf(out, "request %s %s\n", path, message.FullName())
		writeFields(out, message, written)
	}
	return out.Flush()
}

func writeFields(out io.Writer, message protoreflect.MessageDescriptor, written map[protoreflect.FullName]bool) {
	if written[message.FullName()] {
		return
	}
	written[message.FullName()] = true
	for i := range message.Fields().Len() {
		field := message.Fields().Get(i)
		fmt.Fprintf(out, "field %s %d %s %s\n", message.FullName(), field.Number(), field.Kind(), field.Cardinality())
		if nested := field.Message(); nested != nil {
			writeFields(out, nested, written)
		}
	}
}
