//! Standard output. Whoever reads it may stop at any time (`bursar plan | head -1`), which is no
//! failure: what would follow is not written, and the command ends as it would have. The standard library's `println!`
//! panics there, so these take its place in all of the program; this module is the first that `main.rs` names.

use std::{
    fmt,
    io::{ErrorKind, Write, stdout},
    process::exit,
};

use crate::logging;

/// As `sysexits.h` has it: no command means anything else by it.
const CANNOT_BE_WRITTEN: i32 = 74;

/// Writes to standard output. False if it is read no more.
pub fn out(text: fmt::Arguments<'_>) -> bool {
    let mut out = stdout().lock();
    match out.write_fmt(text).and_then(|()| out.flush()) {
        Ok(()) => true,
        Err(error) if error.kind() == ErrorKind::BrokenPipe => false,
        Err(error) => {
            let error = format!("standard output cannot be written: {error}");
            logging::fail(&error, "check where it goes");
            exit(CANNOT_BE_WRITTEN)
        }
    }
}

macro_rules! print {
    ($($text:tt)*) => {{ $crate::output::out(format_args!($($text)*)); }};
}

macro_rules! println {
    () => { print!("\n") };
    ($($text:tt)*) => { print!("{}\n", format_args!($($text)*)) };
}
