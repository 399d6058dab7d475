//! Metrics of the upstream watches that serve several client streams.
//!
//! Owns: the names. Must not know: which watches share an upstream watch.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

/// Metrics of the feeds, over all shards.
#[derive(Clone, Debug)]
pub struct WatchFeedMetrics {
    /// Open feeds.
    pub feeds: Gauge,
    /// Client streams reading a feed.
    pub readers: Gauge,
    /// Watches that joined a feed.
    pub joins: Counter,
}

impl WatchFeedMetrics {
    pub(crate) fn registered(registry: &mut Registry) -> Self {
        let figures = Self { feeds: Gauge::default(), readers: Gauge::default(), joins: Counter::default() };
        let help = "Watches at etcd that serve several client streams";
        registry.register("watch_feeds", help, figures.feeds.clone());
        let help = "Client streams served by a watch that serves several";
        registry.register("watch_feed_readers", help, figures.readers.clone());
        let help = "Client watches moved to a watch that serves several";
        registry.register("watch_feed_joins", help, figures.joins.clone());
        figures
    }
}
