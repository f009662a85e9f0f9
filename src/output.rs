//! Standard output. Its reader may close it at any time (`bursar plan | head -1`), which is no failure: the rest is
//! dropped and the command ends as usual. The standard library's `println!` panics there, so these macros replace it
//! throughout the program. Therefore `main.rs` declares this module first.

use std::{
    fmt,
    io::{ErrorKind, Write, stdout},
    process::exit,
};

use crate::logging;

/// From `sysexits.h`; no command uses it for anything else.
const CANNOT_BE_WRITTEN: i32 = 74;

/// Writes to standard output. False once it is closed.
pub fn out(text: fmt::Arguments<'_>) -> bool {
    let mut out = stdout().lock();
    match out.write_fmt(text).and_then(|()| out.flush()) {
        Ok(()) => true,
        Err(error) if error.kind() == ErrorKind::BrokenPipe => false,
        Err(error) => {
            let error = format!("standard output cannot be written: {error}");
            logging::fail(&error, "check the target of the output");
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
