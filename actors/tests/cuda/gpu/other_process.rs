//! Another process on the GPU: a second run of the test program, which takes memory on command.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use bursar_budgets::{Address, Bytes, CudaDevice, Device, DeviceError};

/// The environment variable that is set in the other process.
const ROLE: &str = "BURSAR_TEST_OTHER_PROCESS";

/// The prefix of each answer. Any other output comes from the test harness.
const ANSWER: &str = "other_process: ";

/// Memory that stays free when the process takes all it can get.
const HEADROOM: Bytes = Bytes::mib(16);

/// The process takes memory in pieces of this size, so that other processes can take memory between
/// two pieces.
const PIECE: Bytes = Bytes::gib(1);

/// Another process, which holds memory until this handle is dropped.
pub struct OtherProcess {
    child: Child,
    stdin: Option<ChildStdin>,
    says: BufReader<ChildStdout>,
}

impl OtherProcess {
    /// Starts a process that holds only a context. `test` is the name of the test in this
    /// program that calls [`live`].
    pub fn moves_in(test: &str) -> OtherProcess {
        let program = std::env::current_exe().expect("the path of the test program is known");
        let mut child = Command::new(program)
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(ROLE, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the other process starts");
        let stdin = child.stdin.take();
        let says = BufReader::new(child.stdout.take().expect("the output is piped"));
        let mut other_process = OtherProcess { child, stdin, says };
        other_process.read_reply();
        other_process
    }

    /// Lets the process take or free memory until the GPU has `bytes` free, to within a few MiB.
    /// Returns the free bytes.
    pub fn leave(&mut self, bytes: Bytes) -> Bytes {
        self.tell("leave", bytes);
        let [_, free] = self.read_reply();
        free
    }

    /// Lets the process take or free memory until it holds `bytes`, or all it can get.
    /// Returns the bytes held.
    pub fn hold(&mut self, bytes: Bytes) -> Bytes {
        self.tell("hold", bytes);
        let [held, _] = self.read_reply();
        held
    }

    /// Lets the process free all its memory. Returns the free bytes of the GPU, as
    /// that process sees them.
    pub fn sees(&mut self) -> Bytes {
        self.leave(Bytes::MAX)
    }

    fn tell(&mut self, what: &str, bytes: Bytes) {
        let stdin = self.stdin.as_mut().expect("the input exists until the value is dropped");
        writeln!(stdin, "{what} {}", bytes.0).expect("the other process reads its input");
    }

    /// Reads the bytes that the process holds, and the free bytes.
    fn read_reply(&mut self) -> [Bytes; 2] {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.says.read_line(&mut line).expect("the output can be read") > 0, "the other process died");
            if let Some((_, answer)) = line.split_once(ANSWER) {
                let numbers = answer.split_whitespace().map(|number| Bytes(number.parse().expect("a number")));
                return numbers.collect::<Vec<_>>().try_into().expect("there are two numbers");
            }
        }
    }
}

impl Drop for OtherProcess {
    fn drop(&mut self) {
        // The process ends at the end of its input.
        drop(self.stdin.take());
        let ended = self.child.wait();
        if !std::thread::panicking() {
            assert!(ended.expect("the other process can be waited for").success(), "the other process failed");
        }
    }
}

/// The main loop of the other process. Each line of input names an amount of memory to take or to
/// leave free. The loop ends with the input. In any process without this role, the function does
/// nothing.
pub fn live() {
    if std::env::var_os(ROLE).is_none() {
        return println!("skipped, this test is only the other process of other tests");
    }
    let device = CudaDevice::open(0).expect("the GPU of the parent test opens");
    let address: Address = device.reserve(Bytes::gib(256)).expect("reserving addresses takes no memory");
    let free = || device.memory().expect("the device reports its memory").free;
    let mut held = Bytes::ZERO;
    println!("{ANSWER}0 {}", free().0);
    for line in std::io::stdin().lines() {
        let line = line.expect("the input can be read");
        let (what, bytes) = line.split_once(' ').expect("a command and a number of bytes");
        let (bytes, all) = (Bytes(bytes.parse().expect("a number")), held + free());
        let wanted = match what {
            "leave" => all.saturating_sub(bytes),
            "hold" => bytes.min(all.saturating_sub(HEADROOM)),
            what => panic!("unknown command {what}"),
        };
        let wanted = wanted.round_down(Bytes::mib(2));
        if wanted < held {
            device.unback(address.offset(wanted), held - wanted).expect("the bytes belong to this process");
            held = wanted;
        }
        while held < wanted {
            let more = PIECE.min(wanted - held);
            match device.back(address.offset(held), more) {
                Ok(()) => held += more,
                // Other processes take memory too.
                Err(DeviceError::Refused { .. }) => break,
                Err(error) => panic!("{error}"),
            }
        }
        println!("{ANSWER}{} {}", held.0, free().0);
    }
}
