//! Detection of the panic strategy. Cargo builds every crate of a program with the panic strategy
//! of the program's profile, so the `cfg` of this crate shows the user's choice.
//! `tests/it/abort.rs` builds a program with this file to check the detection, so this file must
//! not use anything from the crate.

/// Whether a panic ends the process, which would make supervision impossible.
pub(super) fn panics_abort() -> bool {
    cfg!(panic = "abort")
}
