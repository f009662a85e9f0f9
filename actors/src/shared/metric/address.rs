//! The address on which metrics are served, as a user types it.

use std::{
    fmt,
    net::{Ipv4Addr, SocketAddr},
    str::FromStr,
};

use thiserror::Error;

/// An address and a port. If only a port is given, the address is the loopback interface, which
/// only this machine can reach. Port 0 means any free port.
///
/// ```
/// # use bursar_actors::metric::MetricsAddress;
/// assert_eq!("9464".parse::<MetricsAddress>()?.to_string(), "127.0.0.1:9464");
/// assert_eq!("[::1]:9464".parse::<MetricsAddress>()?.to_string(), "[::1]:9464");
/// assert!("localhost:9464".parse::<MetricsAddress>().is_err(), "names are not looked up");
/// # Ok::<(), bursar_actors::metric::NoAddress>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetricsAddress(pub SocketAddr);

/// The text is not an address.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{typed:?} is neither a port nor an address with a port; write 9464, 127.0.0.1:9464 or [::1]:9464")]
pub struct NoAddress {
    typed: String,
}

impl FromStr for MetricsAddress {
    type Err = NoAddress;

    fn from_str(typed: &str) -> Result<Self, NoAddress> {
        let port = typed.parse().map(|port| SocketAddr::from((Ipv4Addr::LOCALHOST, port)));
        let address = port.or_else(|_| typed.parse());
        address.map(MetricsAddress).map_err(|_| NoAddress { typed: typed.to_owned() })
    }
}

impl From<SocketAddr> for MetricsAddress {
    fn from(address: SocketAddr) -> Self {
        MetricsAddress(address)
    }
}

impl fmt::Display for MetricsAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_port_means_loopback_and_a_bad_address_gets_examples() {
        let of = |typed: &str| typed.parse::<MetricsAddress>().map(|address| address.to_string());
        assert_eq!(of("9464").as_deref(), Ok("127.0.0.1:9464"));
        assert_eq!(of("0").as_deref(), Ok("127.0.0.1:0"));
        assert_eq!(of("0.0.0.0:80").as_deref(), Ok("0.0.0.0:80"));
        for wrong in ["", "70000", "127.0.0.1", "localhost:1", ":9464", "http://127.0.0.1:9464", "::1:9464x"] {
            let error = of(wrong).expect_err(wrong);
            assert!(error.to_string().contains(&format!("{wrong:?}")) && error.to_string().contains("[::1]:9464"));
        }
    }
}
