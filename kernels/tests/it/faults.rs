//! Injected faults: a faulty backend computes like the backend that it wraps, except for the
//! operations that are to fail.

use bursar_kernels::{Cpu, FaultyBackend, KernelError, Scope, WorkCounter, ops::gelu::Gelu};

use crate::ground::{compute, in_poison, passes};

/// Runs `pass` after `arm`.
fn on_faulty<T>(
    arm: impl FnOnce(&FaultyBackend<Cpu>),
    pass: impl FnOnce(&Scope<'_, FaultyBackend<Cpu>>) -> Result<T, KernelError>,
) -> Result<T, KernelError> {
    let (backend, counter) = (FaultyBackend::over(Cpu::new(2)), WorkCounter::default());
    arm(&backend);
    in_poison(|workspace| pass(&Scope::new(&backend, workspace, &counter)))
}

#[test]
fn a_faulty_backend_computes_unchanged_and_fails_on_request() {
    for pass in passes() {
        let bits = |numbers: Vec<f32>| numbers.into_iter().map(f32::to_bits).collect::<Vec<_>>();
        let found = on_faulty(|_| {}, |scope| pass.run(scope)).expect("no fault is injected");
        assert_eq!(bits(found), bits(compute(2, |scope| pass.run(scope))), "{pass:?}");
        let error = on_faulty(|backend| backend.fail_launches(0, 1), |scope| pass.run(scope));
        assert_eq!(
            error.map(drop).expect_err("the fault was injected").to_string(),
            "a launch: this error was injected by a drill",
            "{pass:?}"
        );
    }
}

#[test]
fn injected_faults_start_after_the_requested_number_of_launches() {
    let failed = on_faulty(
        |backend| backend.fail_launches(2, 3),
        |scope| {
            let mut x = scope.upload([1, 4], &[1.0f32; 4])?;
            Ok((0..7).map(|_| scope.gelu(&mut x, Gelu::Erf).is_err()).collect::<Vec<_>>())
        },
    );
    assert_eq!(failed.expect("a copy is not counted as a launch"), [false, false, true, true, true, false, false]);
}
