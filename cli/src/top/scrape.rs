//! Scrapes of a process: its metrics and recent events.

use std::time::Duration;

use bursar::{Bytes, Hint};

use super::{
    address::Address,
    event::{self, Event, NoEvents},
    exposition::{self, Malformed},
    samples::Samples,
};

/// Prefix of the names of Bursar's metrics.
const PREFIX: &str = "bursar_";
/// Time limit for each of the two answers.
const PATIENCE: Duration = Duration::from_secs(3);
/// Maximum size of the metrics: ten times the metrics of a hundred models.
const METRICS_MAX: Bytes = Bytes::mib(8);
const EVENTS_MAX: Bytes = Bytes::kib(256);
/// Number of events that a process keeps.
const EVENTS: usize = 64;

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Scrape {
    /// All metrics with Bursar's prefix.
    pub samples: Samples,
    /// The latest events, or the reason why they are missing.
    pub events: Events,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub enum Events {
    /// The process does not serve events, or does not show them to this client.
    #[default]
    Unavailable,
    /// The latest events, the oldest first.
    Listed(Vec<Event>),
    /// The answer cannot be parsed. The text is the reason.
    Unreadable(String),
}

/// The reason why there is nothing to show.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ScrapeError {
    /// There is no connection, the connection broke, or the answer is not HTTP.
    #[error("no answer from {address}: {why}")]
    Unreachable {
        address: String,
        /// The message of the HTTP client.
        why: String,
    },
    /// The answer took too long.
    #[error("{address} did not answer within {} s", limit.as_secs())]
    Slow { address: String, limit: Duration },
    /// The status is not 200, so another program probably listens there.
    #[error("{address}{path} answers with status {status} instead of 200")]
    Status {
        address: String,
        path: &'static str,
        /// HTTP status of the answer.
        status: u16,
    },
    /// The answer is larger than Bursar's metrics can be.
    #[error("{address}{path} sends more than {limit}")]
    TooLarge {
        address: String,
        path: &'static str,
        /// The limit on the size of an answer.
        limit: Bytes,
    },
    /// The answer is not in Prometheus' text format.
    #[error("{address}/metrics cannot be read: {malformed}")]
    Malformed { address: String, malformed: Malformed },
    /// The answer is not a list of events.
    #[error("{address}/events cannot be read: {found}")]
    NoEvents { address: String, found: NoEvents },
    /// The metrics belong to another program.
    #[error("{address}/metrics has no metric whose name begins with {PREFIX}")]
    NotOurs { address: String },
}

impl Hint for ScrapeError {
    type Text = String;

    fn hint(&self) -> String {
        match self {
            ScrapeError::Unreachable { address, .. } => format!(
                "start the process with `--metrics {address}`, or call `Runtime::serve_metrics` in your own program"
            ),
            ScrapeError::Slow { .. } => "the process may have stopped, or the network is slow; try again".to_owned(),
            ScrapeError::NotOurs { .. } => {
                "metrics appear when a runtime starts; if one has started, another process listens there".to_owned()
            }
            _ => "another program listens there; use the address that was given to `--metrics`".to_owned(),
        }
    }
}

/// Scrapes one address repeatedly over one connection.
pub struct Scraper {
    agent: ureq::Agent,
    address: Address,
}

impl Scraper {
    /// Creates a scraper, which does not connect yet.
    pub fn new(address: Address) -> Self {
        let agent = ureq::Agent::config_builder()
            .timeout_global(Some(PATIENCE))
            .http_status_as_error(false)
            .max_redirects(0)
            // Connect directly, not through a proxy: the process is usually on this machine.
            .proxy(None)
            .build()
            .new_agent();
        Scraper { agent, address }
    }

    /// Scrapes once.
    ///
    /// # Errors
    /// Returns [`ScrapeError`] if there are no metrics. Missing events are not an error.
    pub fn scrape(&self) -> Result<Scrape, ScrapeError> {
        let address = self.address.to_string();
        let text = self.fetch("/metrics", METRICS_MAX)?;
        let samples = exposition::read(&text, PREFIX)
            .map_err(|malformed| ScrapeError::Malformed { address: address.clone(), malformed })?;
        if samples.is_empty() {
            return Err(ScrapeError::NotOurs { address });
        }
        let events = match self.events() {
            Ok(events) => Events::Listed(events),
            // A server with API keys shows its events only to administrators.
            Err(ScrapeError::Status { status: 401 | 403 | 404, .. }) => Events::Unavailable,
            Err(error) => Events::Unreadable(error.to_string()),
        };
        Ok(Scrape { samples, events })
    }

    fn events(&self) -> Result<Vec<Event>, ScrapeError> {
        let text = self.fetch("/events", EVENTS_MAX)?;
        let mut events =
            event::read(&text).map_err(|found| ScrapeError::NoEvents { address: self.address.to_string(), found })?;
        Ok(events.split_off(events.len().saturating_sub(EVENTS)))
    }

    fn fetch(&self, path: &'static str, limit: Bytes) -> Result<String, ScrapeError> {
        let failed = |error| self.failed(error, path, limit);
        let mut answer = self.agent.get(self.address.url(path)).call().map_err(failed)?;
        if answer.status() != 200 {
            let status = answer.status().as_u16();
            return Err(ScrapeError::Status { address: self.address.to_string(), path, status });
        }
        answer.body_mut().with_config().limit(limit.0).lossy_utf8(true).read_to_string().map_err(failed)
    }

    fn failed(&self, error: ureq::Error, path: &'static str, limit: Bytes) -> ScrapeError {
        let address = self.address.to_string();
        match error {
            ureq::Error::Timeout(_) => ScrapeError::Slow { address, limit: PATIENCE },
            ureq::Error::BodyExceedsLimit(_) => ScrapeError::TooLarge { address, path, limit },
            ureq::Error::Io(error) => {
                ScrapeError::Unreachable { address, why: exposition::harmless(&error.to_string()) }
            }
            error => ScrapeError::Unreachable { address, why: exposition::harmless(&error.to_string()) },
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        io::{BufRead, BufReader, Write},
        net::TcpListener,
    };

    use super::*;

    /// Starts a server that sends these answers, one per connection, and then closes.
    fn listener(answers: Vec<String>) -> Address {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port of the loopback");
        let address = listener.local_addr().expect("a local address").to_string().parse().expect("an address");
        std::thread::spawn(move || {
            for answer in answers {
                let (stream, _) = listener.accept().expect("a client connects");
                let asked = BufReader::new(stream.try_clone().expect("a second handle"));
                asked.lines().map_while(Result::ok).find(String::is_empty);
                // A client that has read enough may hang up.
                drop((&stream).write_all(answer.as_bytes()));
            }
        });
        address
    }

    fn answer(status: &str, body: &str) -> String {
        format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}", body.len())
    }

    fn scrape(answers: &[String]) -> Result<Scrape, ScrapeError> {
        Scraper::new(listener(answers.to_vec())).scrape()
    }

    #[test]
    fn metrics_are_read_with_or_without_events() {
        let metrics = answer("200 OK", "# a comment\nother 1\nbursar_device_total_bytes{device=\"host\"} 8\n");
        let events = answer("200 OK", "[{\"number\":3,\"at\":1.5,\"event\":\"canary_given\",\"bytes\":1024}]");
        let found = scrape(&[metrics.clone(), events]).expect("the server answers");
        assert_eq!(found.samples.bytes("bursar_device_total_bytes", &[]), Some(Bytes(8)));
        assert!(matches!(&found.events, Events::Listed(events) if events[0].number == 3), "{:?}", found.events);
        let without = scrape(&[metrics.clone(), answer("404 Not Found", "nothing")]).expect("the server answers");
        assert_eq!(without.events, Events::Unavailable);
        let guarded = scrape(&[metrics.clone(), answer("401 Unauthorized", "a key")]).expect("the server answers");
        assert_eq!(guarded.events, Events::Unavailable);
        let broken = scrape(&[metrics, answer("200 OK", "[")]).expect("the server answers");
        assert!(matches!(&broken.events, Events::Unreadable(why) if why.contains("/events")), "{:?}", broken.events);
    }

    #[test]
    fn an_unexpected_server_on_the_port_gives_a_hint() {
        let redirect = "HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n".to_owned();
        let large = answer("200 OK", &"a 1\n".repeat(METRICS_MAX.as_usize() / 4 + 1));
        for (given, reason) in [
            (answer("404 Not Found", ""), "/metrics answers with status 404"),
            (redirect, "status 302"),
            (answer("200 OK", "<html>\n"), "line 1 is not in Prometheus' text format"),
            (answer("200 OK", "other 1\n"), "no metric whose name begins with bursar_"),
            (large, "more than 8.0 MiB"),
            ("nonsense\r\n\r\n".to_owned(), "no answer from 127.0.0.1"),
        ] {
            let error = scrape(&[given]).expect_err(reason);
            assert!(error.to_string().contains(reason), "{error} does not say {reason}");
            assert!(!error.hint().is_empty());
        }
    }

    #[test]
    fn an_unreachable_address_gives_a_hint_naming_the_flag() {
        let address = {
            let gone = TcpListener::bind("127.0.0.1:0").expect("a port of the loopback");
            gone.local_addr().expect("a local address").to_string()
        };
        let error = Scraper::new(address.parse().expect("an address")).scrape().expect_err("no server listens");
        assert!(matches!(error, ScrapeError::Unreachable { .. }), "{error}");
        assert!(error.hint().contains(&format!("--metrics {address}")), "{}", error.hint());
    }
}
