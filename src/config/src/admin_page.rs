//! The resolved `admin.page` and `admin.hosts`: the status page of the admin address.
//!
//! Owns: the settings. Must not know: requests, the content of the page. Invariant: without the keys the page
//! names nobody.

use super::OwnHosts;

/// The settings of the status page.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PageSettings {
    /// The content of the page.
    pub content: PageContent,
    /// Names of the admin address in the Host header.
    pub hosts: OwnHosts,
}

/// The content of the status page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PageContent {
    /// No page.
    Off,
    /// Everything except for users, peers, addresses and user-agents of clients, and keys.
    #[default]
    Anonymous,
    /// Everything.
    Full,
}
