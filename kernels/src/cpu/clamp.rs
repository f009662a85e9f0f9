//! Clamps elements to a range.

use super::{
    memory::{Rows, write_rows},
    threads::Threads,
};
use crate::calls::Clamp;

pub(super) fn clamp(threads: &Threads, call: Clamp<'_>) {
    let [least, most] = [0, 1].map(|at| Rows::<f32>::of(&call.bounds).all()[at]);
    // NaN is neither less nor more.
    let limit = |x: f32| {
        if x < least {
            least
        } else if x > most {
            most
        } else {
            x
        }
    };
    match &call.x {
        Some(x) => {
            let x = Rows::<f32>::of(x);
            write_rows(threads, &call.out, 2, |row, out| {
                out.iter_mut().zip(x.row(row)).for_each(|(out, x)| *out = limit(*x));
            });
        }
        None => write_rows(threads, &call.out, 2, |_, out| out.iter_mut().for_each(|out| *out = limit(*out))),
    }
}
