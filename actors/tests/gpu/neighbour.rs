//! Another process on the card: a second run of the test's program, which takes memory as told.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use bursar_budgets::{Address, Bytes, CudaDevice, Device, DeviceError};

/// Set in the neighbour's process.
const ROLE: &str = "BURSAR_TEST_NEIGHBOUR";

/// Precedes each of its answers. Other output is the test harness's.
const ANSWER: &str = "neighbour: ";

/// What it leaves when it takes all.
const ROOM: Bytes = Bytes::mib(16);

/// It takes memory in pieces of this size, so that others have a chance in between.
const PIECE: Bytes = Bytes::gib(1);

/// Another process, which holds memory until it is dropped.
pub struct Neighbour {
    child: Child,
    told: Option<ChildStdin>,
    says: BufReader<ChildStdout>,
}

impl Neighbour {
    /// Starts one that holds only a context. `test` is the test of this program that calls [`live`].
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

    /// Lets it take or give until the card has `bytes` free, to a few MiB. Returns what is free then.
    pub fn leave(&mut self, bytes: Bytes) -> Bytes {
        self.tell("leave", bytes);
        let [_, free] = self.hear();
        free
    }

    /// Lets it take or give until it holds `bytes`, or all it can get. Returns what it holds then.
    pub fn hold(&mut self, bytes: Bytes) -> Bytes {
        self.tell("hold", bytes);
        let [held, _] = self.hear();
        held
    }

    /// Lets it give back all. Returns what the card has free then, as another process sees it.
    pub fn sees(&mut self) -> Bytes {
        self.leave(Bytes::MAX)
    }

    fn tell(&mut self, what: &str, bytes: Bytes) {
        let told = self.told.as_mut().expect("it is there until it drops");
        writeln!(told, "{what} {}", bytes.0).expect("it listens");
    }

    /// Reads how much it holds, and how much is free.
    fn hear(&mut self) -> [Bytes; 2] {
        let mut line = String::new();
        loop {
            line.clear();
            assert!(self.says.read_line(&mut line).expect("it can be read") > 0, "the neighbour died");
            if let Some((_, answer)) = line.split_once(ANSWER) {
                let numbers = answer.split_whitespace().map(|number| Bytes(number.parse().expect("a number")));
                return numbers.collect::<Vec<_>>().try_into().expect("two numbers");
            }
        }
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        // It ends when its input ends.
        drop(self.told.take());
        let ended = self.child.wait();
        if !std::thread::panicking() {
            assert!(ended.expect("it can be waited for").success(), "the neighbour failed");
        }
    }
}

/// The neighbour's main loop, in its own process: for each line it holds or leaves that many bytes, until there are no
/// more lines. In any other process it does nothing.
pub fn live() {
    if std::env::var_os(ROLE).is_none() {
        return println!("skipped, this is the neighbour of other stories");
    }
    let device = CudaDevice::open(0).expect("the story that started this has a GPU");
    let address: Address = device.reserve(Bytes::gib(256)).expect("addresses are not memory");
    let free = || device.memory().expect("it says").free;
    let mut held = Bytes::ZERO;
    println!("{ANSWER}0 {}", free().0);
    for line in std::io::stdin().lines() {
        let line = line.expect("it can be read");
        let (what, bytes) = line.split_once(' ').expect("what to do, and how much");
        let (bytes, all) = (Bytes(bytes.parse().expect("a number")), held + free());
        let wanted = match what {
            "leave" => all.saturating_sub(bytes),
            "hold" => bytes.min(all.saturating_sub(ROOM)),
            what => panic!("{what} cannot be done"),
        };
        let wanted = wanted.round_down(Bytes::mib(2));
        if wanted < held {
            device.unback(address.offset(wanted), held - wanted).expect("it is its own");
            held = wanted;
        }
        while held < wanted {
            let more = PIECE.min(wanted - held);
            match device.back(address.offset(held), more) {
                Ok(()) => held += more,
                // Others take memory too.
                Err(DeviceError::Refused { .. }) => break,
                Err(error) => panic!("{error}"),
            }
        }
        println!("{ANSWER}{} {}", held.0, free().0);
    }
}
