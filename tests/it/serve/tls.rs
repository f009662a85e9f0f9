//! The server over TLS: clients with and without TLS, and invalid files.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use bursar::Hint;
use bursar_serve::{ListenError, ServeOptions, Server, Service, TlsFiles};
use rustls_pki_types::{CertificateDer, ServerName, pem::PemObject};
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};
use tokio_rustls::{
    TlsConnector,
    client::TlsStream,
    rustls::{ClientConfig, RootCertStore, crypto::ring},
};

use super::client::{Fixture, hello, posted, rest};
use crate::stage::{Stage, small, story};

fn file(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/it/serve/tls").join(name)
}

fn files(certificates: &str, key: &str) -> TlsFiles {
    TlsFiles { certificates: file(certificates), key: file(key) }
}

async fn fixture(options: ServeOptions) -> Fixture {
    let stage = Stage::set(small()).await;
    let service = Service::new(&stage.runtime, options);
    service.add(["demo"], stage.model.clone());
    let files = files("server.pem", "server.key");
    let server = Server::start(service.clone(), "127.0.0.1:0", Some(&files)).await.expect("the TLS files are valid");
    Fixture { stage, service, server }
}

/// Connects a client that trusts only the tests' root certificate.
async fn greet(fixture: &Fixture) -> io::Result<TlsStream<TcpStream>> {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(file("root.pem")).expect("a certificate")).expect("a root");
    let config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let config = config.with_safe_default_protocol_versions().expect("TLS versions are supported");
    let config = config.with_root_certificates(roots).with_no_client_auth();
    let name = ServerName::try_from("localhost").expect("a name");
    TlsConnector::from(Arc::new(config)).connect(name, fixture.connect().await).await
}

/// Reads until the text contains `end`.
async fn until(stream: &mut TlsStream<TcpStream>, end: &str) -> String {
    let mut received = Vec::new();
    let reading = async {
        while !received.ends_with(end.as_bytes()) {
            received.push(stream.read_u8().await.expect("the stream goes on"));
        }
    };
    timeout(Duration::from_secs(20), reading).await.expect("the server answers in time");
    String::from_utf8(received).expect("text")
}

#[test]
fn a_reply_streams_over_tls_and_its_connection_is_kept() {
    story(async {
        let fixture = fixture(ServeOptions::default()).await;
        assert_eq!(fixture.server.scheme(), "https");
        let mut client = greet(&fixture).await.expect("the certificate is trusted");
        let body = hello(json!({"stream": true})).to_string();
        let asked = posted("/v1/chat/completions", "", body.as_bytes());
        let asked = String::from_utf8(asked).expect("text").replace("connection: close\r\n", "");
        for _ in 0..2 {
            client.write_all(asked.as_bytes()).await.expect("the server reads");
            let received = until(&mut client, "\r\n0\r\n\r\n").await;
            assert!(received.starts_with("HTTP/1.1 200") && received.contains("data: [DONE]"), "{received}");
            assert!(received.matches("\"content\":").count() > 3, "the reply comes in several pieces: {received}");
        }
        client
            .write_all(b"GET /health/live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            .await
            .expect("the server reads");
        let mut received = String::new();
        client.read_to_string(&mut received).await.expect("TLS is closed properly");
        assert!(received.starts_with("HTTP/1.1 200"), "{received}");
        fixture.end().await;
    });
}

#[test]
fn a_client_without_tls_is_closed_without_disturbing_others() {
    story(async {
        let fixture = fixture(ServeOptions::default()).await;
        let received = fixture.get("/health").await;
        assert_eq!(received.status, 0, "plain HTTP is not answered: {received:?}");
        for noise in [&b"\x16\x03\x01\xff\xff"[..], &[0; 4096], &[0xff; 100_000]] {
            let mut stream = fixture.connect().await;
            drop(stream.write_all(noise).await);
            drop(stream.shutdown().await);
            rest(stream).await;
        }
        let mut client = greet(&fixture).await.expect("the certificate is trusted");
        client
            .write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            .await
            .expect("the server reads");
        assert!(until(&mut client, "}").await.starts_with("HTTP/1.1 200"));
        fixture.end().await;
    });
}

#[test]
fn an_unfinished_tls_handshake_times_out_and_frees_its_slot() {
    story(async {
        let short = ServeOptions { connections: 1, head_time: Duration::from_millis(300), ..ServeOptions::default() };
        let fixture = fixture(short).await;
        let silent = fixture.connect().await;
        let mut slow = fixture.connect().await;
        // Send only the beginning of a 512-byte ClientHello.
        slow.write_all(&[0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3]).await.expect("the bytes are sent");
        let mut client = greet(&fixture).await.expect("a connection slot is free after both handshakes timed out");
        client
            .write_all(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            .await
            .expect("the server reads");
        assert!(until(&mut client, "}").await.starts_with("HTTP/1.1 200"));
        assert_eq!((rest(silent).await.len(), rest(slow).await.len()), (0, 0));
        fixture.end().await;
    });
}

#[test]
fn wrong_tls_files_are_named_before_listening() {
    story(async {
        let stage = Stage::set(small()).await;
        for (certificates, key, at_fault, why) in [
            ("none.pem", "server.key", "none.pem", "No such file"),
            ("server.pem", "none.key", "none.key", "No such file"),
            ("make.py", "server.key", "make.py", "no certificate"),
            ("server.key", "server.key", "server.key", "no certificate"),
            ("server.pem", "server.pem", "server.pem", "no private key"),
            ("server.pem", "other.key", "other.key", "does not belong to the first certificate"),
        ] {
            let service = Service::new(&stage.runtime, ServeOptions::default());
            let error =
                Server::start(service, "127.0.0.1:0", Some(&files(certificates, key))).await.expect_err("a wrong file");
            let ListenError::Tls { file, reason } = &error else { panic!("{error:?}") };
            assert!(file.ends_with(at_fault) && reason.contains(why), "{certificates}, {key}: {error}");
            assert!(error.to_string().contains(at_fault) && error.hint().contains("PEM"), "{error}: {}", error.hint());
            assert!(!error.to_string().contains("BEGIN"), "{error}");
        }
        stage.runtime.shutdown().await;
    });
}
