//! A hub on the loopback interface: the file protocol of the Hugging Face hub,
//! with failures on demand.

use std::{
    collections::BTreeMap,
    io::{BufRead, BufReader, Write},
    net::{TcpListener, TcpStream},
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
};

/// The commit of all files in the repository.
pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
pub const ID: &str = "tiny/model";

#[derive(Clone, Debug, Default)]
pub enum Fault {
    #[default]
    Nothing,
    /// Every request gets this status and error code.
    Status(u16, &'static str),
    /// This header has this value, or is left out if the value is `None`.
    Header(&'static str, Option<&'static str>),
    /// A connection is closed after this many bytes of a body.
    CutAfter(usize),
    /// Range requests are ignored, and a connection is closed after this many bytes.
    NoRanges(usize),
    /// Bodies are longer than announced.
    TooLong,
    /// Weight files stop in the middle of a body, and the connection stays open.
    Stall,
}

/// A request: "HEAD /path", `true` if it had a token, and the first byte that it asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct Asked {
    pub what: String,
    pub has_token: bool,
    pub from: usize,
}

struct Shared {
    files: Mutex<BTreeMap<String, Vec<u8>>>,
    asked: Mutex<Vec<Asked>>,
    fault: Mutex<Fault>,
    is_over: AtomicBool,
    port: u16,
}

/// A hub that serves until it is dropped.
pub struct Hub(Arc<Shared>);

impl Hub {
    /// Starts a hub with the files of a folder.
    pub fn of(folder: &Path) -> Hub {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port of the loopback");
        let files = std::fs::read_dir(folder).expect("a folder").flatten().filter(|entry| entry.path().is_file());
        let files = files.map(|entry| {
            (entry.file_name().to_string_lossy().into_owned(), std::fs::read(entry.path()).expect("a file"))
        });
        let shared = Arc::new(Shared {
            files: Mutex::new(files.collect()),
            asked: Mutex::default(),
            fault: Mutex::default(),
            is_over: AtomicBool::new(false),
            port: listener.local_addr().expect("bound").port(),
        });
        let served = shared.clone();
        std::thread::spawn(move || {
            for connection in listener.incoming().flatten() {
                if served.is_over.load(Relaxed) {
                    return;
                }
                let shared = served.clone();
                std::thread::spawn(move || drop(shared.answer(connection)));
            }
        });
        Hub(shared)
    }

    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.0.port)
    }

    pub fn fail(&self, fault: Fault) {
        *self.0.fault.lock().expect("no panic") = fault;
    }

    pub fn put(&self, file: &str, content: &str) {
        self.0.files.lock().expect("no panic").insert(file.to_owned(), content.as_bytes().to_vec());
    }

    pub fn remove(&self, file: &str) {
        self.0.files.lock().expect("no panic").remove(file);
    }

    /// All requests so far.
    pub fn asked(&self) -> Vec<Asked> {
        self.0.asked.lock().expect("no panic").clone()
    }
}

impl Drop for Hub {
    fn drop(&mut self) {
        self.0.is_over.store(true, Relaxed);
        // Wake the listener thread, which then ends.
        drop(TcpStream::connect(("127.0.0.1", self.0.port)));
    }
}

impl Shared {
    fn answer(&self, connection: TcpStream) -> std::io::Result<()> {
        let mut lines = BufReader::new(connection.try_clone()?).lines();
        let first = lines.next().transpose()?.unwrap_or_default();
        let what = first.trim_end_matches(" HTTP/1.1").to_owned();
        let (mut has_token, mut from) = (false, 0);
        for line in lines {
            let line = line?.to_ascii_lowercase();
            if line.is_empty() {
                break;
            }
            has_token |= line == "authorization: bearer a-token";
            if let Some(range) = line.strip_prefix("range: bytes=") {
                from = range.trim_end_matches('-').parse().expect("an open range");
            }
        }
        self.asked.lock().expect("no panic").push(Asked { what: what.clone(), has_token, from });
        let fault = self.fault.lock().expect("no panic").clone();
        if let Fault::Status(status, code) = fault {
            return reply(connection, status, &[("X-Error-Code", code.to_owned())], b"", 0);
        }
        let (method, path) = what.split_once(' ').unwrap_or_default();
        let is_head = method == "HEAD";
        let files = self.files.lock().expect("no panic").clone();
        if let Some(file) = path.strip_prefix("/elsewhere/") {
            return self.send(connection, is_head, &files[file], from, &fault, Vec::new());
        }
        if let Some(rest) = path.strip_prefix("/old/name/") {
            return reply(connection, 307, &[("Location", format!("/{ID}/{rest}"))], b"", 0);
        }
        let Some((revision, file)) =
            path.strip_prefix(&format!("/{ID}/resolve/")).and_then(|rest| rest.split_once('/'))
        else {
            return reply(connection, 404, &[("X-Error-Code", "RepoNotFound".into())], b"", 0);
        };
        if revision != "main" && revision != COMMIT {
            return reply(connection, 404, &[("X-Error-Code", "RevisionNotFound".into())], b"", 0);
        }
        let Some(content) = files.get(file) else {
            return reply(connection, 404, &[("X-Error-Code", "EntryNotFound".into())], b"", 0);
        };
        let mut headers = vec![("X-Repo-Commit", COMMIT.to_owned()), ("ETag", format!("\"{}\"", etag(content)))];
        let is_elsewhere = file.ends_with(".safetensors");
        if is_elsewhere {
            headers.push(("X-Linked-Size", content.len().to_string()));
            headers.push(("X-Linked-ETag", format!("\"{}\"", etag(content))));
            // A different host, which must not get the token.
            headers.push(("Location", format!("http://localhost:{}/elsewhere/{file}", self.port)));
        }
        if let Fault::Header(name, value) = fault {
            headers.retain(|(known, _)| *known != name);
            headers.extend(value.map(|value| (name, value.to_owned())));
        }
        if is_elsewhere {
            reply(connection, 302, &headers, b"", 0)
        } else {
            self.send(connection, is_head, content, from, &fault, headers)
        }
    }

    fn send(
        &self,
        mut connection: TcpStream,
        is_head: bool,
        content: &[u8],
        from: usize,
        fault: &Fault,
        mut headers: Vec<(&'static str, String)>,
    ) -> std::io::Result<()> {
        let mut long = content.to_vec();
        if matches!(fault, Fault::TooLong) && !is_head {
            long.extend([0; 99]);
        }
        let from = if matches!(fault, Fault::NoRanges(_)) { 0 } else { from };
        let status = if from > 0 { 206 } else { 200 };
        if from > 0 {
            headers.push(("Content-Range", format!("bytes {from}-{}/{}", long.len() - 1, long.len())));
        }
        let body = if is_head { &[][..] } else { &long[from..] };
        let announced = if is_head { content.len() } else { body.len() };
        match fault {
            Fault::CutAfter(bytes) | Fault::NoRanges(bytes) => {
                let cut = &body[..body.len().min(*bytes)];
                reply(connection, status, &headers, cut, announced)
            }
            Fault::Stall if !is_head && body.len() > 100_000 => {
                reply(connection.try_clone()?, status, &headers, &body[..50_000], announced)?;
                // Wait until the client closes the connection.
                let _ = std::io::copy(&mut connection, &mut std::io::sink());
                Ok(())
            }
            _ => {
                reply(connection.try_clone()?, status, &headers, body, announced)?;
                connection.flush()
            }
        }
    }
}

fn reply(
    mut connection: TcpStream,
    status: u16,
    headers: &[(&str, String)],
    body: &[u8],
    announced: usize,
) -> std::io::Result<()> {
    let mut head = format!("HTTP/1.1 {status} so\r\nConnection: close\r\nContent-Length: {announced}\r\n");
    for (name, value) in headers {
        head += &format!("{name}: {value}\r\n");
    }
    connection.write_all(format!("{head}\r\n").as_bytes())?;
    connection.write_all(body)
}

/// A hash of the contents.
fn etag(content: &[u8]) -> String {
    use std::hash::{DefaultHasher, Hash, Hasher};
    let mut hasher = DefaultHasher::new();
    content.hash(&mut hasher);
    format!("{:040x}", hasher.finish())
}
