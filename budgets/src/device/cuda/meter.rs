//! Memory that this process takes on a GPU outside leases. The memory is measured when it is taken,
//! and counted until it is freed.
//!
//! The driver keeps such memory in pools. Creating an object may appear to take no memory, because
//! the object fits in a pool that grew earlier. Freeing an object may return nothing, because the
//! pool still holds a newer object. This module therefore counts the bytes by which the driver's
//! pools grew and shrank, under the name of the source that made the pool grow.

use std::{
    collections::BTreeMap,
    sync::{Mutex, MutexGuard, PoisonError},
};

use crate::{Bytes, DeviceError};

/// Two measurements taken at the same time. The change of either measurement between two times is
/// the memory taken in between. `ours` is independent of other processes, but not always available.
#[derive(Clone, Copy)]
pub(super) struct Left {
    /// The driver's count of free bytes, plus the backed bytes.
    pub(super) free: Bytes,
    /// The bytes that this process holds, minus the backed bytes.
    pub(super) ours: Option<Bytes>,
}

impl Left {
    /// The bytes taken between two measurements. Uses `ours` if both measurements have it.
    fn taken_until(self, later: Left) -> Bytes {
        match (self.ours, later.ours) {
            (Some(before), Some(after)) => after.saturating_sub(before),
            _ => self.free.saturating_sub(later.free),
        }
    }
}

/// Measures the memory that work takes, one piece of work at a time. Two concurrent measurements
/// would count the same bytes twice.
#[derive(Default)]
pub(super) struct Meter {
    turn: Mutex<()>,
    counted: Mutex<BTreeMap<&'static str, Bytes>>,
}

impl Meter {
    /// The sum of all counted bytes.
    pub(super) fn counted(&self) -> Bytes {
        self.lock().values().sum()
    }

    /// The counted bytes by the source that took them.
    pub(super) fn by_source(&self) -> BTreeMap<&'static str, Bytes> {
        self.lock().clone()
    }

    /// Runs `work` while no other thread measures.
    pub(super) fn in_turn<T>(&self, work: impl FnOnce() -> T) -> T {
        let _turn = self.turn();
        work()
    }

    /// Runs `work` and returns the bytes that it took, without counting them.
    pub(super) fn taken_by<T>(
        &self,
        left: impl Fn() -> Result<Left, DeviceError>,
        work: impl FnOnce() -> T,
    ) -> Result<(T, Bytes), DeviceError> {
        let turn = self.turn();
        let before = left()?;
        let outcome = work();
        let after = left();
        // If the second measurement fails, the outcome is dropped here, and dropping it
        // may need the lock.
        drop(turn);
        Ok((outcome, before.taken_until(after?)))
    }

    /// Runs `work` and counts the bytes that it took under `source`. The bytes count even if the
    /// work failed, because the driver may keep them.
    pub(super) fn count<T>(
        &self,
        source: &'static str,
        left: impl Fn() -> Result<Left, DeviceError>,
        work: impl FnOnce() -> T,
    ) -> Result<T, DeviceError> {
        let (outcome, taken) = self.taken_by(left, work)?;
        *self.lock().entry(source).or_default() += taken;
        Ok(outcome)
    }

    /// Runs `work`, which frees memory that `source` took, and subtracts the freed bytes, from that
    /// source first. Subtracts at most the counted bytes, because another process may have freed
    /// memory too. If a measurement fails, all bytes stay counted.
    pub(super) fn count_off(
        &self,
        source: &'static str,
        left: impl Fn() -> Result<Left, DeviceError>,
        work: impl FnOnce(),
    ) {
        let _turn = self.turn();
        let before = left();
        work();
        if let (Ok(before), Ok(after)) = (before, left()) {
            let (mut back, mut counted) = (after.taken_until(before), self.lock());
            let mut less = |bytes: &mut Bytes| {
                let gone = back.min(*bytes);
                (back, *bytes) = (back - gone, *bytes - gone);
            };
            // A pool that another source made grow is freed with the last object in it, so the rest
            // is subtracted from other sources.
            counted.get_mut(source).into_iter().for_each(&mut less);
            counted.values_mut().for_each(less);
        }
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<&'static str, Bytes>> {
        // No code panics while it holds this lock, so a poisoned lock guards a valid map.
        self.counted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn turn(&self) -> MutexGuard<'_, ()> {
        // The lock guards no data that a panic could leave half changed.
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;
    use crate::AtomicBytes;

    const ALL: Bytes = Bytes::gib(1);

    /// A driver that reports the memory that is left.
    #[derive(Default)]
    struct Driver {
        taken: AtomicBytes,
    }

    impl Driver {
        fn left(&self) -> Result<Left, DeviceError> {
            Ok(Left { free: ALL - self.taken.load(), ours: None })
        }

        fn take(&self, bytes: Bytes) {
            self.taken.fetch_add(bytes);
        }

        fn give(&self, bytes: Bytes) {
            self.taken.fetch_sub(bytes);
        }
    }

    #[test]
    fn measurements_on_many_threads_count_each_byte_once() {
        let (driver, meter, begin) = (Driver::default(), Meter::default(), Barrier::new(8));
        std::thread::scope(|threads| {
            for thread in 0..8 {
                let (driver, meter, begin) = (&driver, &meter, &begin);
                threads.spawn(move || {
                    begin.wait();
                    for round in 0..200 {
                        let bytes = Bytes::kib(1 + (thread + round) % 7);
                        let take = || {
                            driver.take(bytes);
                            // Gives another thread the chance to run between the two measurements.
                            std::thread::yield_now();
                        };
                        meter.count("handles", || driver.left(), take).expect("the driver reports memory");
                        if round % 2 == 0 {
                            meter.count_off("handles", || driver.left(), || driver.give(bytes));
                        }
                    }
                });
            }
        });
        assert_eq!(meter.counted(), driver.taken.load());
        assert!(!meter.counted().is_zero());
    }

    #[test]
    fn a_driver_pool_is_counted_until_the_driver_frees_it() {
        let (driver, meter) = (Driver::default(), Meter::default());
        let left = || driver.left();
        // The first allocation makes a pool grow, and the second fits in that pool.
        meter.count("kernels", left, || driver.take(Bytes::mib(2))).expect("the driver reports memory");
        meter.count("streams", left, || ()).expect("the driver reports memory");
        meter.count_off("kernels", left, || ());
        assert_eq!(meter.counted(), Bytes::mib(2), "the pool is counted until the driver frees it");
        assert_eq!(meter.by_source(), BTreeMap::from([("kernels", Bytes::mib(2)), ("streams", Bytes::ZERO)]));
        meter.count_off("streams", left, || driver.give(Bytes::mib(2)));
        assert_eq!(meter.counted(), Bytes::ZERO);
    }

    #[test]
    fn freed_bytes_reduce_the_count_of_their_own_source_first() {
        let (driver, meter) = (Driver::default(), Meter::default());
        let left = || driver.left();
        meter.count("kernels", left, || driver.take(Bytes::mib(2))).expect("the driver reports memory");
        meter.count("streams", left, || driver.take(Bytes::mib(4))).expect("the driver reports memory");
        meter.count_off("streams", left, || driver.give(Bytes::mib(3)));
        assert_eq!(meter.by_source(), BTreeMap::from([("kernels", Bytes::mib(2)), ("streams", Bytes::mib(1))]));
        meter.count_off("streams", left, || driver.give(Bytes::mib(2)));
        assert_eq!(meter.by_source(), BTreeMap::from([("kernels", Bytes::mib(1)), ("streams", Bytes::ZERO)]));
    }

    #[test]
    fn memory_freed_by_another_process_never_makes_the_count_negative() {
        let (driver, meter) = (Driver::default(), Meter::default());
        let left = || driver.left();
        driver.take(Bytes::mib(100));
        meter.count("handles", left, || driver.take(Bytes::mib(2))).expect("the driver reports memory");
        meter.count_off("handles", left, || driver.give(Bytes::mib(52)));
        assert_eq!(meter.counted(), Bytes::ZERO);
    }

    #[test]
    fn memory_taken_by_another_process_is_not_counted() {
        let (driver, meter, says_whose) = (Driver::default(), Meter::default(), std::cell::Cell::new(true));
        let left = || Ok(Left { ours: says_whose.get().then_some(Bytes::mib(500)), ..driver.left()? });
        meter.count("kernels", left, || driver.take(Bytes::mib(640))).expect("the driver reports memory");
        assert_eq!(meter.counted(), Bytes::ZERO);
        // `ours` is not used if only one of the two measurements has it.
        let falls_silent = || {
            says_whose.set(false);
            driver.take(Bytes::mib(2));
        };
        meter.count("kernels", left, falls_silent).expect("the driver reports memory");
        assert_eq!(meter.counted(), Bytes::mib(2));
    }

    #[test]
    fn memory_left_by_failed_work_is_counted() {
        let (driver, meter) = (Driver::default(), Meter::default());
        let failed: Result<(), &str> = meter
            .count(
                "kernels",
                || driver.left(),
                || {
                    driver.take(Bytes::mib(3));
                    Err("half of it was loaded")
                },
            )
            .expect("the driver reports memory");
        assert_eq!((failed.is_err(), meter.counted()), (true, Bytes::mib(3)));
        let lost = || Err(DeviceError::Lost { reason: "gone".to_owned() });
        meter.count_off("kernels", lost, || driver.give(Bytes::mib(3)));
        assert_eq!(meter.counted(), Bytes::mib(3));
        meter
            .count("kernels", lost, || panic!("nothing is allocated when memory cannot be measured"))
            .expect_err("the device is lost");
    }
}
