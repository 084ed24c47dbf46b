//! Files and a GPU for the tests of loads.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memferry::engine::cpu::ProfileSource;
use memferry::engine::cuda::{CudaEngine, CudaProfile};
use memferry::engine::testing::cuda_model::{CudaFaults, CudaModel};
use memferry::load::{DeviceTensors, LoadError, LoadReport, Loader, SafetensorsFile};
use memferry::{EngineSelection, Ferry, PinLimits};

/// A model of a GPU, and a loader with it.
pub(crate) struct ModelGpu {
    pub(crate) model: Arc<CudaModel>,
    pub(crate) loader: Loader,
    engine: Arc<CudaEngine>,
}

impl ModelGpu {
    /// Loads a file into new memory of the model.
    pub(crate) fn load(
        &self,
        file: SafetensorsFile,
    ) -> Result<(DeviceTensors, LoadReport), LoadError> {
        self.load_by(&self.loader, file)
    }

    /// The same by another loader with the same ferry.
    pub(crate) fn load_by(
        &self,
        loader: &Loader,
        file: SafetensorsFile,
    ) -> Result<(DeviceTensors, LoadReport), LoadError> {
        let memory = self.engine.allocate(file.data_bytes().max(1)).unwrap();
        loader.load_to_device(file, memory)
    }
}

pub(crate) fn model_gpu(faults: CudaFaults) -> ModelGpu {
    let model = CudaModel::with_faults(faults);
    let limits = PinLimits { max_bytes: 64 << 20, max_entries: 64 };
    let engine = CudaEngine::with_driver(model.clone(), CudaProfile::default(), limits).unwrap();
    let engine = Arc::new(engine);
    let builder = Ferry::builder().profile(ProfileSource::BuiltIn).gpu(EngineSelection::Off);
    let ferry = builder.engine(engine.clone(), 2).build().unwrap();
    let loader = Loader::builder().threads(2).build(ferry).unwrap();
    ModelGpu { model, loader, engine }
}

/// Bytes that differ from place to place and from seed to seed.
pub(crate) fn bytes_of(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    (0..length.div_ceil(8)).flat_map(|_| next()).take(length).collect()
}

/// One tensor of bytes for a file.
pub(crate) struct NamedBytes {
    pub(crate) name: String,
    pub(crate) data: Vec<u8>,
}

/// Tensors with these lengths.
pub(crate) fn tensors_of(lengths: &[usize]) -> Vec<NamedBytes> {
    let tensor = |(at, &length): (usize, &usize)| NamedBytes {
        name: format!("layer.{at}.weight"),
        data: bytes_of(at as u64 + 1, length),
    };
    lengths.iter().enumerate().map(tensor).collect()
}

/// Writes a safetensors file of `U8` tensors.
pub(crate) fn write_tensors(path: &Path, tensors: &[NamedBytes]) -> PathBuf {
    let mut entries = Vec::new();
    let mut offset = 0;
    for NamedBytes { name, data } in tensors {
        let end = offset + data.len();
        entries.push(format!(
            r#""{name}":{{"dtype":"U8","shape":[{}],"data_offsets":[{offset},{end}]}}"#,
            data.len()
        ));
        offset = end;
    }
    let data: Vec<&[u8]> = tensors.iter().map(|tensor| tensor.data.as_slice()).collect();
    write_file(path, &format!("{{{}}}", entries.join(",")), &data.concat());
    path.to_owned()
}

/// Writes a file with any header.
pub(crate) fn write_file(path: &Path, header: &str, data: &[u8]) {
    let mut file = File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.write_all(data).unwrap();
}
