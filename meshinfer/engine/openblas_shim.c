/* Gives MLX's matrix products on the CPU a fast BLAS.
 *
 * The Linux wheel of MLX links the reference BLAS (2.7 GFLOP/s a core). The package scipy-openblas32
 * ships OpenBLAS for every processor type (112 GFLOP/s), but with a prefix before its names. Loaded into
 * the global scope before MLX, the one function below is found first when MLX asks for `cblas_sgemm`.
 *
 * A product with one row (each decode step) goes to the matrix-vector routine: it reads the weights
 * straight on, where gemm first packs them: 14 instead of 8 tokens/s on SmolLM2-135M.
 */
#include <string.h>

enum { ROW_MAJOR = 101, NO_TRANSPOSE = 111, TRANSPOSE = 112 };

void scipy_cblas_sgemm(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *, int);
void scipy_cblas_sgemv(int, int, int, int, float, const float *, int, const float *, int, float, float *, int);

void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc) {
  const int plain = (trans_a == NO_TRANSPOSE || trans_a == TRANSPOSE) && (trans_b == NO_TRANSPOSE || trans_b == TRANSPOSE);
  if (order != ROW_MAJOR || m != 1 || !plain) {
    scipy_cblas_sgemm(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    return;
  }
  /* gemm with beta 0 ignores what c held; gemv may multiply it, and 0 * NaN is NaN. */
  if (beta == 0.0f) memset(c, 0, (size_t)n * sizeof(float));
  const int stride = trans_a == NO_TRANSPOSE ? 1 : lda;
  if (trans_b == TRANSPOSE)
    scipy_cblas_sgemv(ROW_MAJOR, NO_TRANSPOSE, n, k, alpha, b, ldb, a, stride, beta, c, 1);
  else
    scipy_cblas_sgemv(ROW_MAJOR, TRANSPOSE, k, n, alpha, b, ldb, a, stride, beta, c, 1);
}
