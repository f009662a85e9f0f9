//! Whether panics unwind. Cargo builds every crate of a program with the panic strategy of the program's profile, so
//! this crate's own `cfg` shows what the user chose. `tests/it/abort.rs` builds a program with this file to prove it,
//! so nothing of the crate may be used here.

/// Whether a panic ends the process, which would make supervision impossible.
pub(super) fn panics_abort() -> bool {
    cfg!(panic = "abort")
}
