//! Measures what the host does for a picture: `cargo run --release -p bursar-model --example measure_picture -- FILE`.

use std::time::Instant;

use bursar_model::error::ModelError;
use bursar_model::flow::image_bytes::{ImageBytes, ImageLimits};
use bursar_model::processor::{ImageProcessor, ImageProcessorConfig};

const ROUNDS: usize = 20;

fn main() -> Result<(), ModelError> {
    let Some(file) = std::env::args().nth(1) else {
        eprintln!("usage: measure_picture FILE");
        std::process::exit(2);
    };
    let limits = ImageLimits::default();
    let bytes = ImageBytes::open(file, &limits)?;
    let processor = ImageProcessor::new(ImageProcessorConfig::default())?;
    let header = bytes.probe(&limits)?;
    let plan = processor.plan(header.width, header.height)?;
    let picture = bytes.decode(&limits)?;
    let mut pixels = vec![0.0; plan.patches * plan.patch_values];
    println!("{} x {} -> {} x {}", header.width, header.height, plan.resized.width, plan.resized.height);
    println!("probe     {:8.3} ms", median(|| bytes.probe(&limits).map(drop))?);
    println!("decode    {:8.3} ms", median(|| bytes.decode(&limits).map(drop))?);
    println!("resize    {:8.3} ms", median(|| processor.resize(&picture).map(drop))?);
    println!(
        "process   {:8.3} ms (resize, patches, hash)",
        median(|| processor.process_into(&picture, &mut pixels).map(drop))?
    );
    println!("all       {:8.3} ms", median(|| processor.process_into(&bytes.decode(&limits)?, &mut pixels).map(drop))?);
    Ok(())
}

/// Milliseconds of the middle one of several rounds.
fn median<E>(mut work: impl FnMut() -> Result<(), E>) -> Result<f64, E> {
    let mut times = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        let start = Instant::now();
        work()?;
        times.push(start.elapsed().as_secs_f64() * 1e3);
    }
    times.sort_by(f64::total_cmp);
    Ok(times[ROUNDS / 2])
}
