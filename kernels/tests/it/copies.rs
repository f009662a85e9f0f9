//! Copies of blocks, rows and states to host memory and back.

use std::sync::Arc;

use bursar_budgets::{Bytes, Device, HostConfig, HostDevice};
use bursar_kernels::Cpu;

use crate::ground::{copy_to_host_and_back, rows_go_and_come_back, states_go_and_come_back};

#[test]
fn blocks_copied_to_the_host_return_to_the_chosen_places() {
    let device: Arc<dyn Device> = Arc::new(HostDevice::new(HostConfig::small(Bytes::mib(4))).expect("small pages"));
    copy_to_host_and_back(&Cpu::new(1), &device);
    rows_go_and_come_back(&Cpu::new(1), &device);
    states_go_and_come_back(&Cpu::new(1), &device);
}
