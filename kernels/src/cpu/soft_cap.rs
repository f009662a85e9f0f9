//! Logit softcapping.

use super::{memory::write_rows, threads::Threads};
use crate::calls::SoftCap;

pub(super) fn soft_cap(threads: &Threads, call: SoftCap<'_>) {
    let cap = call.cap;
    write_rows(threads, &call.x, 32, |_, x| x.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh()));
}
