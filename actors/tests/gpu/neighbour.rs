//! Another process on the card: the test's own program once more, which takes memory as it is told to.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use bursar_budgets::{Address, Bytes, CudaDevice, Device, DeviceError};

/// Set for the program that is the neighbour.
const ROLE: &str = "BURSAR_TEST_NEIGHBOUR";

/// Before each of its answers: what else it prints is the test harness's.
const ANSWER: &str = "neighbour: ";

/// What it leaves where it takes all that it finds.
const ROOM: Bytes = Bytes::mib(16);

/// It takes memory in pieces of this size: whoever else wants some meanwhile has a chance.
const PIECE: Bytes = Bytes::gib(1);

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

    /// It takes or gives so much that the card has `bytes` free, to a few MiB; gives what the card then has.
    pub fn leave(&mut self, bytes: Bytes) -> Bytes {
        self.tell("leave", bytes);
        let [_, free] = self.hear();
        free
    }

    /// It takes or gives until it holds `bytes`, or all that it finds; gives what it then holds.
    pub fn hold(&mut self, bytes: Bytes) -> Bytes {
        self.tell("hold", bytes);
        let [held, _] = self.hear();
        held
    }

    /// It gives back what it holds; gives what the card then has free, as another process sees it.
    pub fn sees(&mut self) -> Bytes {
        self.leave(Bytes::MAX)
    }

    fn tell(&mut self, what: &str, bytes: Bytes) {
        let told = self.told.as_mut().expect("it is there until it drops");
        writeln!(told, "{what} {}", bytes.0).expect("it listens");
    }

    /// What it holds and what is free.
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
        // Nothing more to hear is its end.
        drop(self.told.take());
        let ended = self.child.wait();
        if !std::thread::panicking() {
            assert!(ended.expect("it can be waited for").success(), "the neighbour failed");
        }
    }
}

/// The neighbour's life, in its own process: holds or leaves as many bytes as each line says, until there are no more lines.
/// In any other process it is nothing.
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
                // Others take what they find too.
                Err(DeviceError::Refused { .. }) => break,
                Err(error) => panic!("{error}"),
            }
        }
        println!("{ANSWER}{} {}", held.0, free().0);
    }
}
