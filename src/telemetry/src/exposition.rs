//! The formats of a scraped metrics page, and the choice of a format by a client's `Accept` header.
//!
//! Owns: content types, the choice, and the conversion from OpenMetrics to the Prometheus text format. Must
//! not know: any metric, HTTP servers. Invariant: the conversion expects the output of the metrics library
//! for counters, gauges and histograms without exemplars; the library writes no other line for these types.

use http::HeaderMap;
use http::header::{ACCEPT, HeaderValue};

/// A text format of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExpositionFormat {
    /// OpenMetrics 1.0.0, the format of the metrics library.
    OpenMetrics,
    /// The Prometheus text format 0.0.4, read by every scraper.
    PrometheusText,
}

/// The largest weight of each kind of media range in an `Accept` header; `None` without such a range.
#[derive(Default)]
struct AcceptedWeights {
    open_metrics: Option<f32>,
    plain: Option<f32>,
    any_text: Option<f32>,
    anything: Option<f32>,
}

impl ExpositionFormat {
    /// The format for a client with these request headers: OpenMetrics if `Accept` names its media type, with
    /// a weight above 0 that is not below the weight of plain text; else the Prometheus text format. Of the
    /// parameters of a media range only the weight counts (RFC 9110 §12.5.1).
    #[must_use]
    pub fn accepted_by(headers: &HeaderMap) -> Self {
        let mut weights = AcceptedWeights::default();
        let lines = headers.get_all(ACCEPT).iter().filter_map(|line| line.to_str().ok());
        for (media_type, weight) in lines.flat_map(|line| line.split(',')).filter_map(media_range) {
            let known = match &*media_type {
                "application/openmetrics-text" => &mut weights.open_metrics,
                "text/plain" => &mut weights.plain,
                "text/*" => &mut weights.any_text,
                "*/*" => &mut weights.anything,
                _ => continue,
            };
            *known = Some(known.map_or(weight, |other| other.max(weight)));
        }
        // The most specific range decides on plain text.
        let text = weights.plain.or(weights.any_text).or(weights.anything).unwrap_or_default();
        match weights.open_metrics {
            Some(weight) if weight > 0.0 && weight >= text => Self::OpenMetrics,
            _ => Self::PrometheusText,
        }
    }

    /// The value of `Content-Type`.
    #[must_use]
    pub fn content_type(self) -> HeaderValue {
        HeaderValue::from_static(match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::PrometheusText => "text/plain; version=0.0.4; charset=utf-8",
        })
    }

    /// Converts an OpenMetrics text into this format.
    #[must_use]
    pub fn convert(self, open_metrics: String) -> String {
        match self {
            Self::OpenMetrics => open_metrics,
            Self::PrometheusText => prometheus_text(&open_metrics),
        }
    }
}

/// The media type in lower case, and the weight; `None` for a malformed weight.
fn media_range(range: &str) -> Option<(String, f32)> {
    let mut parts = range.split(';');
    let media_type = parts.next()?.trim().to_ascii_lowercase();
    let mut weight = 1.0;
    for (name, value) in parts.filter_map(|part| part.split_once('=')) {
        if name.trim().eq_ignore_ascii_case("q") {
            weight = value.trim().parse().ok().filter(|weight| (0.0..=1.0).contains(weight))?;
        }
    }
    Some((media_type, weight))
}

/// Samples are the same in both formats. OpenMetrics has units and an end mark in addition, and describes a
/// counter by its name without `_total`.
fn prometheus_text(open_metrics: &str) -> String {
    let mut text = String::with_capacity(open_metrics.len());
    let mut push = |parts: &[&str]| {
        parts.iter().for_each(|part| text.push_str(part));
        text.push('\n');
    };
    // HELP stands before TYPE, which tells the name.
    let mut help = None;
    for line in open_metrics.lines() {
        if let Some(described) = line.strip_prefix("# HELP ") {
            help = described.split_once(' ').map(|(_, words)| words);
        } else if let Some((name, kind)) =
            line.strip_prefix("# TYPE ").and_then(|described| described.split_once(' '))
        {
            let suffix = if kind == "counter" { "_total" } else { "" };
            if let Some(words) = help.take() {
                push(&["# HELP ", name, suffix, " ", words]);
            }
            push(&["# TYPE ", name, suffix, " ", kind]);
        } else if !line.starts_with("# UNIT ") && line != "# EOF" {
            push(&[line]);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::ExpositionFormat::{OpenMetrics, PrometheusText};
    use super::*;

    fn accepted(lines: &[&'static str]) -> ExpositionFormat {
        let lines = lines.iter().map(|line| (ACCEPT, HeaderValue::from_static(line)));
        ExpositionFormat::accepted_by(&lines.collect())
    }

    #[test]
    fn a_client_gets_open_metrics_only_if_it_asks_for_it_and_does_not_prefer_text() {
        let open = "application/openmetrics-text";
        // Prometheus 2.5 to 2.34, 2.35 and later, 3.
        for scraper in [
            "application/openmetrics-text; version=0.0.1,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,\
             text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
            "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,\
             application/openmetrics-text;version=0.0.1;q=0.4,\
             text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1",
        ] {
            assert_eq!(accepted(&[scraper]), OpenMetrics, "{scraper}");
        }
        for (lines, format) in [
            (&[][..], PrometheusText),
            (&["*/*"], PrometheusText),
            (&["text/html, */*;q=0.8"], PrometheusText),
            (&["application/*"], PrometheusText),
            (&[open], OpenMetrics),
            (&["Application/OpenMetrics-Text; Q=0.001"], OpenMetrics),
            (&["text/html", open], OpenMetrics),
            (&["application/openmetrics-text;q=0"], PrometheusText),
            (&["application/openmetrics-text;q=0.000, */*"], PrometheusText),
            (&["application/openmetrics-text;q=x"], PrometheusText),
            (&["application/openmetrics-text;q=2"], PrometheusText),
            (&["text/plain, application/openmetrics-text"], OpenMetrics),
            (&["text/plain;q=0.5, application/openmetrics-text;q=0.4"], PrometheusText),
            (&["application/openmetrics-text;q=0.4, */*;q=0.5"], PrometheusText),
            (&["text/plain;q=0.1, application/openmetrics-text;q=0.4, */*;q=0.5"], OpenMetrics),
            (&["text/plain;q=0, application/openmetrics-text;q=0.4, text/*"], OpenMetrics),
        ] {
            assert_eq!(accepted(lines), format, "{lines:?}");
        }
    }

    #[test]
    fn the_old_text_describes_a_counter_by_its_whole_name_and_has_no_unit_and_no_end() {
        let open = "# HELP a Calls, all.\n# TYPE a counter\na_total{code=\"OK\"} 2\na_total{code=\"# EOF\"} 1\n\
                    # HELP b_seconds Age.\n# TYPE b_seconds gauge\n# UNIT b_seconds seconds\nb_seconds 0.5\n\
                    # TYPE c_seconds counter\n# UNIT c_seconds seconds\nc_seconds_total 1.0\n\
                    # HELP d Time.\n# TYPE d histogram\nd_sum 1.0\nd_count 1\nd_bucket{le=\"+Inf\"} 1\n# EOF\n";
        let old = "# HELP a_total Calls, all.\n# TYPE a_total counter\n\
                   a_total{code=\"OK\"} 2\na_total{code=\"# EOF\"} 1\n\
                   # HELP b_seconds Age.\n# TYPE b_seconds gauge\nb_seconds 0.5\n\
                   # TYPE c_seconds_total counter\nc_seconds_total 1.0\n\
                   # HELP d Time.\n# TYPE d histogram\nd_sum 1.0\nd_count 1\nd_bucket{le=\"+Inf\"} 1\n";
        assert_eq!(PrometheusText.convert(open.to_owned()), old);
        assert_eq!(OpenMetrics.convert(open.to_owned()), open);
    }
}
