// Reads a Grafana dashboard from stdin by Grafana's own schema, strictly: an unknown field, a wrong type or a missing
// field is an error. Prints the title and the number of panels that are no rows.
package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/grafana/grafana-foundation-sdk/go/cog"
	"github.com/grafana/grafana-foundation-sdk/go/dashboard"
	"github.com/grafana/grafana-foundation-sdk/go/prometheus"
	"github.com/grafana/grafana-foundation-sdk/go/stat"
	"github.com/grafana/grafana-foundation-sdk/go/table"
	"github.com/grafana/grafana-foundation-sdk/go/timeseries"
)

func main() {
	if err := check(); err != nil {
		fmt.Fprintln(os.Stderr, "dashboard:", err)
		os.Exit(1)
	}
}

func check() error {
	text, err := io.ReadAll(os.Stdin)
	if err != nil {
		return err
	}
	// Without these the queries and the options of panels would be read as any JSON.
	runtime := cog.NewRuntime()
	runtime.RegisterDataqueryVariant(prometheus.VariantConfig())
	runtime.RegisterPanelcfgVariant(stat.VariantConfig())
	runtime.RegisterPanelcfgVariant(table.VariantConfig())
	runtime.RegisterPanelcfgVariant(timeseries.VariantConfig())
	var read dashboard.Dashboard
	// Where nothing is wrong the library returns an empty list of faults that is no nil, and keeps no panels: the
	// panels are read once more.
	if err := new(dashboard.Dashboard).UnmarshalJSONStrict(text); err != nil && err.Error() != "" {
		return err
	}
	if err := json.Unmarshal(text, &read); err != nil {
		return err
	}
	if err := read.Validate(); err != nil {
		return err
	}
	panels := 0
	for _, panel := range read.Panels {
		if panel.Panel != nil {
			panels++
		}
	}
	fmt.Printf("%s: %d panels\n", *read.Title, panels)
	return nil
}
