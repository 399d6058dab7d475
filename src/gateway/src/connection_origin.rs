//! The origin of a client connection, as repeated in the records of its calls.
//!
//! Owns: listener, address, the client's name for its software, and the connection's figures. Must not know:
//! calls, records.

use std::cell::OnceCell;
use std::net::SocketAddr;
use std::sync::Arc;

use http::HeaderMap;
use http::header::USER_AGENT;

use crate::client_figures::ClientFigures;
use keyward_records::audit::record::cut_name;
use keyward_telemetry::listener_metrics::ListenerFigures;

/// The facts of a connection repeated in each record.
#[derive(Debug)]
pub struct ConnectionOrigin {
    /// The listener's name.
    pub listener: Arc<str>,
    /// The client's address; `None` on a unix socket.
    pub remote: Option<SocketAddr>,
    /// The text of `remote`.
    pub remote_text: Option<Box<str>>,
    /// The user agent of the first call: all calls of a connection come from one client, or from one proxy.
    user_agent: OnceCell<Option<Box<str>>>,
    /// The metrics of the listener.
    pub listener_figures: Arc<ListenerFigures>,
    /// What the connection has done so far.
    pub figures: ClientFigures,
}

impl ConnectionOrigin {
    /// The origin of a connection accepted by `listener`.
    #[must_use]
    pub fn new(
        listener: Arc<str>,
        remote: Option<SocketAddr>,
        listener_figures: Arc<ListenerFigures>,
        figures: ClientFigures,
    ) -> Self {
        let remote_text = remote.map(|remote| remote.to_string().into());
        Self { listener, remote, remote_text, user_agent: OnceCell::new(), listener_figures, figures }
    }

    /// Notes the user agent of the connection's first call.
    pub fn note_user_agent(&self, headers: &HeaderMap) {
        self.user_agent.get_or_init(|| {
            let agent = headers.get(USER_AGENT).and_then(|agent| agent.to_str().ok())?;
            Some(cut_name(agent).into())
        });
    }

    /// The user agent, as claimed by the client.
    #[must_use]
    pub fn user_agent(&self) -> Option<&str> {
        self.user_agent.get()?.as_deref()
    }
}
