//! The processes that are asked, and what they use.

use std::{fs, process::Stdio, time::Duration};

use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    sync::Mutex,
};

use crate::{Failure, Options, load::Summary};

/// Ticks of `/proc/PID/stat` a second: Linux shows 100 to programs, whatever the kernel counts.
const TICKS: f64 = 100.0;

const PAGE: u64 = 4096;

/// What a process has used so far.
#[derive(Clone, Copy)]
pub struct Watched {
    /// Of all its threads.
    pub cpu: Duration,
    /// Bytes in memory.
    pub resident: u64,
}

impl Watched {
    /// Of the process `pid`, or `self`.
    pub fn of(pid: &str) -> Result<Self, Failure> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        // What follows the program's name, which may have spaces.
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
        let ticks = fields[11].parse::<f64>()? + fields[12].parse::<f64>()?;
        let pages: u64 = fs::read_to_string(format!("/proc/{pid}/statm"))?.split(' ').nth(1).unwrap_or("0").parse()?;
        Ok(Watched { cpu: Duration::from_secs_f64(ticks / TICKS), resident: pages * PAGE })
    }
}

/// A process of ours.
pub struct Process {
    child: Child,
    lines: Mutex<Lines<BufReader<ChildStdout>>>,
    address: String,
}

impl Process {
    /// This program, asking in process.
    pub fn itself() -> Result<Self, Failure> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(std::env::args().skip(1)).arg("--is-child");
        Process::start(command)
    }

    /// A server that is ready.
    pub async fn serving(options: &Options) -> Result<Self, Failure> {
        let mut command = Command::new(&options.server);
        command.args(["serve", "--listen", "127.0.0.1:0", "--model", &options.model]);
        let mut server = Process::start(command)?;
        let listening = server.line().await?;
        server.address = listening.rsplit("//").next().unwrap_or_default().to_owned();
        Ok(server)
    }

    fn start(mut command: Command) -> Result<Self, Failure> {
        let mut child = command.stdout(Stdio::piped()).kill_on_drop(true).spawn()?;
        let output = child.stdout.take().ok_or("its output is ours")?;
        Ok(Process { child, lines: BufReader::new(output).lines().into(), address: String::new() })
    }

    async fn line(&self) -> Result<String, Failure> {
        Ok(self.lines.lock().await.next_line().await?.ok_or("the process has ended")?)
    }

    /// What the child found, of one load after the other.
    pub async fn summary(&self) -> Result<Summary, Failure> {
        Ok(serde_json::from_str(&self.line().await?)?)
    }

    /// Where the server listens.
    pub fn address(&self) -> &str {
        &self.address
    }

    /// What it has used.
    pub fn watch(&self) -> Result<Watched, Failure> {
        Watched::of(&self.child.id().ok_or("it has ended")?.to_string())
    }

    /// Ends it, and waits.
    pub async fn end(mut self) {
        drop(self.child.start_kill());
        drop(self.child.wait().await);
    }
}
