//! The page by which a Keyward is told from a member of etcd: an endpoint may be another Keyward, or this
//! one.
//!
//! Owns: the page, and asking for it. Must not know: who serves the page, the judgement of the doctor.
//! Invariant: the page names nothing but the process, by a number drawn at its start.

use std::sync::LazyLock;

use bytes::Bytes;
use futures_util::future::join_all;
use http::StatusCode;
use ring::rand::{SecureRandom as _, SystemRandom};

use super::metrics_page::get;
use keyward_config::Endpoint;
use keyward_dial::connect::Connector;

/// The path of the page, on listeners with the HTTP/JSON face.
pub const PATH: &str = "/keyward";

/// The page of this process.
static PAGE: LazyLock<String> = LazyLock::new(|| {
    let mut number = [0; 16];
    // Without randomness this process is not told from another one.
    SystemRandom::new().fill(&mut number).unwrap_or_default();
    format!("keyward {:032x}\n", u128::from_be_bytes(number))
});

/// A Keyward at an endpoint of the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeywardEndpoint {
    /// The endpoint.
    pub endpoint: Endpoint,
    /// True if it is this process.
    pub is_this: bool,
}

/// The page of this process.
#[must_use]
pub fn page() -> &'static str {
    &PAGE
}

/// Asks each endpoint for the page, within seconds. Returns those that serve it. `connector` must offer
/// HTTP/1.1.
pub async fn keywards_among(connector: &Connector, endpoints: &[Endpoint]) -> Vec<KeywardEndpoint> {
    let asked = endpoints.iter().map(async |endpoint| {
        let (head, body) = get(connector, endpoint, None, PATH).await?;
        let is_this = of_page(&body).filter(|_| head.status == StatusCode::OK)?;
        Some(KeywardEndpoint { endpoint: endpoint.clone(), is_this })
    });
    join_all(asked).await.into_iter().flatten().collect()
}

/// True for the page of this process, false for that of another; `None` for any other text.
fn of_page(body: &Bytes) -> Option<bool> {
    let is_number = |number: &str| number.len() == 32 && number.bytes().all(|byte| byte.is_ascii_hexdigit());
    let text = std::str::from_utf8(body).ok()?;
    let number = text.strip_prefix("keyward ")?.strip_suffix('\n')?;
    is_number(number).then_some(text == page())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_is_this_ones_or_another_ones_or_none() {
        let of = |text: &str| of_page(&Bytes::copy_from_slice(text.as_bytes()));
        assert_eq!(of(page()), Some(true));
        assert_eq!(of(&format!("keyward {}\n", "0".repeat(32))), Some(false));
        for other in ["", "404 page not found\n", "keyward \n", "keyward x\n", "<html>keyward</html>"] {
            assert_eq!(of(other), None, "{other:?}");
        }
        assert_ne!(page(), format!("keyward {}\n", "0".repeat(32)));
    }
}
