//! The address of a metrics server.

use std::{fmt, net::SocketAddr, str::FromStr};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address(String);

/// The default port, which OpenTelemetry's Prometheus exporters use too.
pub const PORT: u16 = 9464;

impl Address {
    pub fn of(socket: SocketAddr) -> Self {
        Address(socket.to_string())
    }

    /// Returns the address of a port of this machine.
    pub fn port(port: u16) -> Self {
        Address(format!("127.0.0.1:{port}"))
    }

    /// Returns the URL of `path`, which must begin with a slash.
    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.0)
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Address {
    type Err = String;

    /// Parses `host:port`. A host without a port gets the default port. A port without a host means
    /// this machine. A URL as typed in a browser, with `http://` and `/metrics`, is accepted too.
    fn from_str(typed: &str) -> Result<Self, String> {
        let typed_host = typed.strip_prefix("http://").unwrap_or(typed);
        let typed_host = typed_host.strip_suffix("/metrics").unwrap_or(typed_host).trim_end_matches('/');
        let refused =
            || Err(format!("{typed:?} is not an address; expected HOST:PORT, such as 127.0.0.1:{PORT}, or a port"));
        let (host, port) = match typed_host.rsplit_once(':') {
            // In an IPv6 address without brackets, the port cannot be separated from the host.
            Some((host, _)) if host.contains(':') && !(host.starts_with('[') && host.ends_with(']')) => {
                if typed_host.starts_with('[') && typed_host.ends_with(']') {
                    (typed_host, PORT)
                } else {
                    return refused();
                }
            }
            Some((host, port)) => match port.parse() {
                Ok(port) => (host, port),
                Err(_) => return refused(),
            },
            None => match typed_host.parse() {
                Ok(port) => ("", port),
                Err(_) if typed_host.bytes().all(|letter| letter.is_ascii_digit()) => return refused(),
                Err(_) => (typed_host, PORT),
            },
        };
        let host = if host.is_empty() { "127.0.0.1" } else { host };
        let is_of_a_host = |letter: char| letter.is_ascii_alphanumeric() || "-._[]:%".contains(letter);
        if port > 0 && host.chars().all(is_of_a_host) { Ok(Address(format!("{host}:{port}"))) } else { refused() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_host_a_port_or_both() {
        let meant = [
            ("9464", "127.0.0.1:9464"),
            (":81", "127.0.0.1:81"),
            ("gpu-3.lab", "gpu-3.lab:9464"),
            ("10.0.0.7:9000", "10.0.0.7:9000"),
            ("[::1]:9000", "[::1]:9000"),
            ("[::1]", "[::1]:9464"),
            ("http://localhost:9464/metrics", "localhost:9464"),
        ];
        for (typed, address) in meant {
            assert_eq!(typed.parse::<Address>().expect(typed).to_string(), address);
        }
        assert_eq!("81".parse::<Address>().expect("a port").url("/events"), "http://127.0.0.1:81/events");
    }

    #[test]
    fn anything_but_a_host_or_port_is_refused() {
        for typed in ["", "99999", "host:", "host:port", "::1", "0", "https://host:1", "a b:1", "host:1/other"] {
            let refused = typed.parse::<Address>();
            assert!(refused.is_err(), "{typed:?} is refused, but was read as {refused:?}");
        }
    }
}
