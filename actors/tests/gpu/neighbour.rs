//! Another process on the card: the test's own program once more, which takes memory as it is told to.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use bursar_budgets::{Address, Bytes, CudaDevice, Device};

/// Set for the program that is the neighbour.
const ROLE: &str = "BURSAR_TEST_NEIGHBOUR";

/// Before each of its answers: what else it prints is the test harness's.
const ANSWER: &str = "neighbour: ";

/// Another process, which holds memory until it is dropped.
pub struct Neighbour {
    child: Child,
    told: Option<ChildStdin>,
    says: BufReader<ChildStdout>,
}

impl Neighbour {
    /// One that holds a context and nothing else yet. `test` is the test of this program that calls [`live`].
    pub fn moves_in(test: &str) -> Neighbour {
        let program = std::env::current_exe().expect("a program knows where it is");
        let mut child = Command::new(program)
            .args(["--exact", test, "--nocapture", "--test-threads=1"])
            .env(ROLE, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it starts");
        let told = child.stdin.take();
        let says = BufReader::new(child.stdout.take().expect("it was asked for"));
        let mut neighbour = Neighbour { child, told, says };
        neighbour.hear();
        neighbour
    }

    /// It takes or gives so much that the card has `bytes` free, to a few MiB; gives what it then has.
    pub fn leave(&mut self, bytes: Bytes) -> Bytes {
        let told = self.told.as_mut().expect("it is there until it drops");
        writeln!(told, "{}", bytes.0).expect("it listens");
        Bytes(self.hear())
    }

    fn hear(&mut self) -> u64 {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.says.read_line(&mut line).expect("it can be read") > 0, "the neighbour died");
            if let Some((_, answer)) = line.split_once(ANSWER) {
                return answer.trim().parse().expect("a number");
            }
        }
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        // Nothing more to hear is its end.
        drop(self.told.take());
        let ended = self.child.wait();
        if !std::thread::panicking() {
            assert!(ended.expect("it can be waited for").success(), "the neighbour failed");
        }
    }
}

/// The neighbour's life, in its own process: leaves as many bytes free as each line says, until there are no more lines.
/// In any other process it is nothing.
pub fn live() {
    if std::env::var_os(ROLE).is_none() {
        return println!("skipped, this is the neighbour of other stories");
    }
    let device = CudaDevice::open(0).expect("the story that started this has a GPU");
    let piece = Bytes::mib(16);
    let address: Address = device.reserve(Bytes::gib(256)).expect("addresses are not memory");
    let mut held = Bytes::ZERO;
    println!("{ANSWER}0");
    for line in std::io::stdin().lines() {
        let leave = Bytes(line.expect("it can be read").parse().expect("a number"));
        let free = device.memory().expect("it says").free;
        let wanted = (held + free).saturating_sub(leave).round_down(piece);
        if wanted > held {
            device.back(address.offset(held), wanted - held).expect("it was free");
        } else if wanted < held {
            device.unback(address.offset(wanted), held - wanted).expect("it is its own");
        }
        held = wanted;
        println!("{ANSWER}{}", device.memory().expect("it says").free.0);
    }
}
