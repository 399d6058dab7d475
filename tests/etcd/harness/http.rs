//! One HTTP GET over plain TCP: all that health, readiness and metrics need.

use std::{net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

const LIMIT: Duration = Duration::from_secs(2);

/// Status code and body; `None` where nobody answered whole within two seconds.
pub(crate) async fn get(address: SocketAddr, path: &str) -> Option<(u16, String)> {
    let exchange = async {
        let mut stream = TcpStream::connect(address).await.ok()?;
        let request = format!("GET {path} HTTP/1.0\r\nHost: {address}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut reply = Vec::new();
        stream.read_to_end(&mut reply).await.ok()?;
        let reply = String::from_utf8(reply).ok()?;
        let (head, body) = reply.split_once("\r\n\r\n")?;
        let status = head.split(' ').nth(1)?.parse().ok()?;
        Some((status, body.to_owned()))
    };
    timeout(LIMIT, exchange).await.ok()?
}

/// The sum of the samples of a metric in a Prometheus text that have all of `labels`. Zero where there is none: a counter that
/// never counted is not shown.
pub(crate) fn sum(text: &str, name: &str, labels: &[(&str, &str)]) -> f64 {
    let wanted: Vec<String> = labels.iter().map(|(label, value)| format!("{label}=\"{value}\"")).collect();
    let values = text.lines().filter_map(|line| {
        let (sample, value) = line.rsplit_once(' ')?;
        let (metric, has) = sample.split_once('{').unwrap_or((sample, ""));
        let matches = metric == name && wanted.iter().all(|pair| has.contains(pair.as_str()));
        matches.then(|| value.parse::<f64>().expect("a sample is a number"))
    });
    values.sum()
}

#[test]
fn sums_the_samples_that_have_the_labels() {
    let text = "# HELP a\na{x=\"1\",y=\"2\"} 3\na{x=\"1\",y=\"3\"} 4e0\nab{x=\"1\"} 9\nb 5\n";
    assert_eq!(sum(text, "a", &[("x", "1")]), 7.0);
    assert_eq!(sum(text, "a", &[("y", "3"), ("x", "1")]), 4.0);
    assert_eq!(sum(text, "b", &[]), 5.0);
    assert_eq!(sum(text, "c", &[]), 0.0);
}
