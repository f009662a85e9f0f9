//! Printing to standard output, whose reader may close it at any time (`bursar plan | head -1`). A
//! closed reader is not a failure: the rest of the output is dropped and the command ends as usual.
//! The standard library's `println!` panics in that case, so the macros here replace it throughout
//! the program. Macros must be declared before they are used, so `main.rs` declares this module
//! first.

use std::{
    fmt,
    io::{ErrorKind, Write, stdout},
    process::exit,
};

use crate::logging;

/// `EX_IOERR` of `sysexits.h`. No command uses this exit code for anything else.
const CANNOT_BE_WRITTEN: i32 = 74;

/// Writes to standard output. Returns `false` once standard output is closed.
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
