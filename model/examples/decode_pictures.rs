//! Decoder of picture files for `tests/pictures/compare.py`. Reads one path per line from standard
//! input. For each file, writes `<number>.rgb` (a line with width and height, then the pixels) into
//! the folder given as argument, or prints the error.

use std::io::{BufRead, Write};
use std::path::Path;

use bursar_model::flow::{EncodedImage, ImageLimits};

fn main() -> std::io::Result<()> {
    let folder = std::env::args().nth(1).expect("usage: decode_pictures FOLDER < list of files");
    let limits = ImageLimits::default();
    for (number, path) in std::io::stdin().lock().lines().enumerate() {
        match EncodedImage::open(path?, &limits).and_then(|bytes| bytes.decode(&limits)) {
            Ok(picture) => {
                let mut file = std::fs::File::create(Path::new(&folder).join(format!("{number}.rgb")))?;
                writeln!(file, "{} {}", picture.width(), picture.height())?;
                file.write_all(picture.data())?;
            }
            Err(error) => println!("{number} {error}"),
        }
    }
    Ok(())
}
