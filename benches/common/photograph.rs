//! A synthetic photograph. It is generated instead of committed, and is the same on every machine.

use mozjpeg::{ColorSpace, Compress};

/// The pixels of a generated picture.
pub struct Photograph {
    pub width: usize,
    pub height: usize,
    /// `[height, width, 3]` u8.
    pub rgb: Vec<u8>,
}

impl Photograph {
    /// Draws smooth brightness with noise at up to nine scales, the smallest of two pixels. Each
    /// scale is an eighth weaker than the next larger scale, similar to the spectrum of natural
    /// pictures (Field, 1987). Different seeds give different pictures.
    pub fn draw(width: usize, height: usize, seed: u32) -> Self {
        let octaves: Vec<Octave> = (1..=9)
            .map(|power| 1usize << power)
            .filter(|cell| 2 * cell <= width.max(height))
            .map(|cell| Octave::of(width, height, cell, seed))
            .collect();
        let mut rgb = Vec::with_capacity(width * height * 3);
        for y in 0..height {
            for x in 0..width {
                let light = [x as f32 * 60.0 / width as f32, y as f32 * 40.0 / height as f32, 30.0];
                let mut levels = [90.0 + light[0], 80.0 + light[1], 70.0 + light[2]];
                for octave in &octaves {
                    let noise = octave.at(x, y);
                    levels.iter_mut().zip(noise).for_each(|(level, noise)| *level += noise);
                }
                rgb.extend(levels.map(|level| level.clamp(0.0, 255.0) as u8));
            }
        }
        Photograph { width, height, rgb }
    }

    /// A JPEG as cameras write it: baseline, one scan, chroma at half resolution
    /// in both directions (4:2:0).
    pub fn jpeg(&self, quality: f32) -> Vec<u8> {
        self.compressed(quality, |_| {})
    }

    #[allow(dead_code, reason = "chats show cameras' pictures only")]
    /// A JPEG as web servers store it: in several scans, each finer than the scan before.
    pub fn progressive_jpeg(&self, quality: f32) -> Vec<u8> {
        self.compressed(quality, Compress::set_progressive_mode)
    }

    fn compressed(&self, quality: f32, change: impl FnOnce(&mut Compress)) -> Vec<u8> {
        let mut compress = Compress::new(ColorSpace::JCS_RGB);
        compress.set_size(self.width, self.height);
        compress.set_fastest_defaults();
        compress.set_quality(quality);
        compress.set_chroma_sampling_pixel_sizes((2, 2), (2, 2));
        change(&mut compress);
        let mut compress = compress.start_compress(Vec::new()).expect("writing to memory succeeds");
        compress.write_scanlines(&self.rgb).expect("the picture has all rows");
        compress.finish().expect("writing to memory succeeds")
    }

    #[allow(dead_code, reason = "chats show cameras' pictures only")]
    /// A PNG as a screenshot is stored.
    pub fn png(&self) -> Vec<u8> {
        let mut encoded = std::io::Cursor::new(Vec::new());
        let picture = image::RgbImage::from_raw(self.width as u32, self.height as u32, self.rgb.clone());
        picture
            .expect("three bytes a pixel")
            .write_to(&mut encoded, image::ImageFormat::Png)
            .expect("writing to memory succeeds");
        encoded.into_inner()
    }
}

/// Noise at one scale: random levels on a grid, interpolated linearly.
struct Octave {
    cell: usize,
    across: usize,
    levels: Vec<[f32; 3]>,
}

impl Octave {
    fn of(width: usize, height: usize, cell: usize, seed: u32) -> Self {
        let (across, down) = (width / cell + 2, height / cell + 2);
        let strength = 11.0 * (cell as f32).powf(0.2);
        let mut random = Xorshift(seed.wrapping_mul(0x9e37_79b9) ^ cell as u32 | 1);
        let levels = (0..across * down).map(|_| {
            let light = random.next() * strength;
            // Colors vary less than brightness.
            [0.0, 0.3, -0.2].map(|colour| light + colour * random.next() * strength)
        });
        Octave { cell, across, levels: levels.collect() }
    }

    fn at(&self, x: usize, y: usize) -> [f32; 3] {
        let (column, row) = (x / self.cell, y / self.cell);
        let (right, below) = ((x % self.cell) as f32 / self.cell as f32, (y % self.cell) as f32 / self.cell as f32);
        let corner = |dx: usize, dy: usize| self.levels[(row + dy) * self.across + column + dx];
        let (a, b, c, d) = (corner(0, 0), corner(1, 0), corner(0, 1), corner(1, 1));
        std::array::from_fn(|channel| {
            let above = a[channel] + (b[channel] - a[channel]) * right;
            let under = c[channel] + (d[channel] - c[channel]) * right;
            above + (under - above) * below
        })
    }
}

/// Marsaglia's xorshift (2003), scaled to numbers from -1 to 1.
struct Xorshift(u32);

impl Xorshift {
    fn next(&mut self) -> f32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 17;
        self.0 ^= self.0 << 5;
        self.0 as f32 / (u32::MAX / 2) as f32 - 1.0
    }
}
