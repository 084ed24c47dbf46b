//! A safetensors file with a validated header.

use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;

use safetensors::Dtype;
use safetensors::tensor::Metadata;

use crate::FileSource;
use crate::error::LoadError;

/// The limit of the format's own library. A larger header is a mistake or an attack.
const MAX_HEADER_BYTES: u64 = 100_000_000;

/// One tensor of a file.
///
/// ```no_run
/// use memferry::load::SafetensorsFile;
///
/// for tensor in SafetensorsFile::open("model.safetensors")?.tensors() {
///     println!("{}: {:?} {:?}", tensor.name, tensor.dtype, tensor.shape);
/// }
/// # Ok::<_, memferry::load::LoadError>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// The type of its elements.
    pub dtype: Dtype,
    /// Its shape; the elements are in row-major order.
    pub shape: Vec<usize>,
    /// Where its bytes are in the file.
    pub bytes: Range<u64>,
}

impl Tensor {
    /// Its length in bytes.
    pub fn len(&self) -> usize {
        (self.bytes.end - self.bytes.start) as usize
    }

    /// Whether it has no element.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A safetensors file that is open, with a header that was found valid: the tensors cover the rest
/// of the file without a gap or an overlap, and each has the length of its shape and type.
///
/// ```no_run
/// use memferry::load::SafetensorsFile;
///
/// let file = SafetensorsFile::open("model.safetensors")?;
/// println!("{} tensors, {} bytes", file.tensors().len(), file.data_bytes());
/// # Ok::<_, memferry::load::LoadError>(())
/// ```
#[derive(Debug)]
pub struct SafetensorsFile {
    source: FileSource,
    tensors: Vec<Tensor>,
    metadata: HashMap<String, String>,
    data: Range<u64>,
}

impl SafetensorsFile {
    /// Opens a file and validates its header.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, LoadError> {
        let source = FileSource::open(path)?;
        let invalid =
            |reason: String| LoadError::InvalidFile { path: source.path().to_owned(), reason };
        if source.len() < 8 {
            return Err(invalid(format!(
                "it has {} bytes, fewer than the length of a header",
                source.len()
            )));
        }
        let mut length = [0; 8];
        source.read_exact(0, &mut length)?;
        let header_bytes = u64::from_le_bytes(length);
        if header_bytes > MAX_HEADER_BYTES || header_bytes > source.len() - 8 {
            return Err(invalid(format!(
                "its header claims {header_bytes} bytes, the file has {}",
                source.len()
            )));
        }
        let mut header = vec![0; header_bytes as usize];
        source.read_exact(8, &mut header)?;
        let metadata: Metadata = serde_json::from_slice(&header)
            .map_err(|error| invalid(format!("its header is wrong: {error}")))?;

        let start = 8 + header_bytes;
        let data = start..source.len();
        let declared = metadata.data_len() as u64;
        if data.end - data.start != declared {
            return Err(invalid(format!(
                "its tensors have {declared} bytes, the file has {} behind the header",
                data.end - data.start
            )));
        }
        let tensor = |name: String| {
            let info = metadata.info(&name)?;
            let (from, to) = info.data_offsets;
            let bytes = start + from as u64..start + to as u64;
            Some(Tensor { name, dtype: info.dtype, shape: info.shape.clone(), bytes })
        };
        let tensors = metadata.offset_keys().into_iter().filter_map(tensor).collect();
        let metadata = metadata.metadata().clone().unwrap_or_default().into_iter().collect();
        Ok(Self { source, tensors, metadata, data })
    }

    /// The tensors, in the order of the file.
    pub fn tensors(&self) -> &[Tensor] {
        &self.tensors
    }

    /// The texts that the writer of the file stored with it.
    pub fn metadata(&self) -> &HashMap<String, String> {
        &self.metadata
    }

    /// Where the tensors are in the file.
    pub fn data(&self) -> Range<u64> {
        self.data.clone()
    }

    /// The length of all tensors together.
    pub fn data_bytes(&self) -> usize {
        (self.data.end - self.data.start) as usize
    }

    /// The file itself.
    pub fn source(&self) -> &FileSource {
        &self.source
    }

    /// Gives the file away, to load placements from it.
    pub fn into_source(self) -> FileSource {
        self.source
    }
}
