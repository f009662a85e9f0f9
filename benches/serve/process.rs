//! The processes that run the model, and their CPU time and memory.

use std::{fs, process::Stdio, time::Duration};

use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    sync::Mutex,
};

use crate::{Failure, Options, load::Summary};

/// Ticks per second in `/proc/PID/stat`. Linux reports 100 to programs, whatever rate the
/// kernel uses.
const TICKS: f64 = 100.0;

/// The resources that a process has used so far.
#[derive(Clone, Copy)]
pub struct Watched {
    /// CPU time of all threads.
    pub cpu: Duration,
    /// Bytes of memory that are resident (RSS).
    pub resident: u64,
}

impl Watched {
    /// Reads the values of the process `pid`, or of this process for `self`.
    pub fn of(pid: &str) -> Result<Self, Failure> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        // The fields after the program's name, which may contain spaces.
        let fields: Vec<&str> = stat.rsplit(") ").next().unwrap_or_default().split(' ').collect();
        let ticks = fields[11].parse::<f64>()? + fields[12].parse::<f64>()?;
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let resident = status.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB"));
        let resident_kib: u64 = resident.unwrap_or("0").parse()?;
        Ok(Watched { cpu: Duration::from_secs_f64(ticks / TICKS), resident: resident_kib << 10 })
    }
}

pub struct Process {
    child: Child,
    lines: Mutex<Lines<BufReader<ChildStdout>>>,
    address: String,
}

impl Process {
    /// Starts this program as the child that sends requests in process.
    pub fn itself() -> Result<Self, Failure> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(std::env::args().skip(1)).arg("--is-child");
        Process::start(command)
    }

    /// Starts a server and waits until it listens. The server may still be loading its model.
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
        let output = child.stdout.take().ok_or("the output of the process is not piped")?;
        Ok(Process { child, lines: BufReader::new(output).lines().into(), address: String::new() })
    }

    async fn line(&self) -> Result<String, Failure> {
        Ok(self.lines.lock().await.next_line().await?.ok_or("the process has ended")?)
    }

    /// Reads the child's summary of its next load.
    pub async fn summary(&self) -> Result<Summary, Failure> {
        Ok(serde_json::from_str(&self.line().await?)?)
    }

    pub fn address(&self) -> &str {
        &self.address
    }

    /// Reads the resources used so far.
    pub fn watch(&self) -> Result<Watched, Failure> {
        Watched::of(&self.child.id().ok_or("the process has ended")?.to_string())
    }

    /// Kills the process and waits until it has ended.
    pub async fn end(mut self) {
        drop(self.child.start_kill());
        drop(self.child.wait().await);
    }
}
