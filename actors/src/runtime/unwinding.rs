//! Whether panics unwind. Cargo builds every crate of a program with the panic strategy of the program's profile, so this
//! crate sees in its own configuration what a user has chosen; `tests/it/abort.rs` builds a program to see that it is so.
//! This file uses nothing of the crate, for that test.

/// Whether a panic ends the process, so that nobody could supervise anything.
pub(super) fn panics_abort() -> bool {
    cfg!(panic = "abort")
}
