//! The program `bursar-dynamo`: one model of Bursar as a worker of a Dynamo deployment.

use std::sync::Arc;

use bursar_dynamo::{BursarWorker, Options};
use clap::Parser;

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let config = options.worker_config()?;
    dynamo_backend_common::run(Arc::new(BursarWorker::new(options)), config)
}
