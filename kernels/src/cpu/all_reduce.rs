//! The sum over ranks, of which there is one here.

use super::threads::Threads;
use crate::ops::all_reduce::Call;

pub(super) fn all_reduce(_: &Threads, _: Call<'_>) {}
